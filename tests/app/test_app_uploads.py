"""Visitors' files: what becomes a picture, and what is refused with a sentence."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vision_ttt.app.pictures import enlarged, heat_map, loss_curves
from vision_ttt.app.uploads import LARGEST_FILE, LONGEST_SIDE, open_upload
from vision_ttt.data import ImageError
from vision_ttt.explain import LossCourse


def test_a_camera_s_picture_is_upright_and_small(tmp_path: Path) -> None:
    pixels = np.zeros((400, 2400, 3), np.uint8)
    pixels[:, :240] = 255  # white at the left
    exif = Image.Exif()
    exif[0x0112] = 6  # turned to the right for showing
    Image.fromarray(pixels).save(tmp_path / "photo.jpg", exif=exif)
    picture = open_upload(tmp_path / "photo.jpg")
    assert picture.size == (round(LONGEST_SIDE / 6), LONGEST_SIDE)
    assert picture.mode == "RGB"
    assert picture.getpixel((150, 50)) > (250, 250, 250)  # white at the top
    assert picture.getpixel((150, 1500)) < (5, 5, 5)


def test_what_is_broken_or_too_large_is_refused(tmp_path: Path) -> None:
    def refused(name: str, told: str) -> None:
        with pytest.raises(ImageError, match=told) as error:
            open_upload(tmp_path / name)
        assert str(tmp_path) not in str(error.value)

    (tmp_path / "text.png").write_text("no picture")
    refused("text.png", r"cannot decode image text\.png: not an image of PNG, .*damaged")
    Image.new("RGB", (64, 64)).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:-30])
    refused("cut.png", r"cannot decode image cut\.png")
    (tmp_path / "empty.jpg").touch()
    refused("empty.jpg", r"image empty\.jpg")
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(LARGEST_FILE + 1)  # takes no room on the disk
    refused("large.png", r"the file has 20\.0 MB; at most 20 are accepted")
    Image.new("1", (8000, 8000)).save(tmp_path / "bomb.png")
    assert (tmp_path / "bomb.png").stat().st_size < 100_000
    refused("bomb.png", "8000 × 8000 pixels, 64 million; at most 40 million are accepted")


def test_a_map_lies_over_the_picture() -> None:
    picture = Image.new("RGB", (60, 40), "grey")
    picture.paste("white", (0, 0, 30, 20))  # at the top left
    values = torch.zeros(4, 6)
    values[:2, 3:] = 1  # at the top right

    def drawn(column: float, row: float, *step: tuple[int, int]) -> int:
        """The brightness at a place in parts of the whole, which has the colour bar below."""
        whole = heat_map(picture, values, "‖G‖", *step).convert("L")
        return whole.getpixel((int(column * whole.width), int(row * whole.height)))

    dark = drawn(0.25, 0.7)
    assert drawn(0.75, 0.2) > dark + 60
    assert dark + 20 < drawn(0.25, 0.2) < dark + 50
    assert drawn(0.75, 0.7) == dark
    assert drawn(0.58, 0.2, (10, 12)) < drawn(0.58, 0.2) - 30  # 72 columns: it begins later
    values = values.flip(0)
    assert drawn(0.75, 0.55, (15, 10)) < drawn(0.75, 0.55) - 30  # 60 rows
    for size in ((2048, 16), (16, 2048)):
        assert max(heat_map(Image.new("RGB", size), values, "‖G‖").size) < 1200


def test_small_pictures_keep_their_pixels_apart() -> None:
    small = Image.new("RGB", (32, 16), "white")
    small.putpixel((0, 0), (0, 0, 0))
    shown = enlarged(small)
    assert shown.size == (480, 240)
    assert [shown.getpixel((n, n))[0] for n in (0, 14, 15)] == [0, 0, 255]
    assert enlarged(shown) is shown


def test_curves_are_drawn_of_any_length() -> None:
    for count in (1, 1000):
        curve = torch.linspace(1, 0, count)
        assert min(loss_curves(LossCourse(curve, curve / 2, curve / 4), "block 1").size) > 300


@pytest.mark.parametrize("size", [(4096, 1), (3, 20_000)])
def test_a_narrow_picture_keeps_a_pixel(tmp_path: Path, size: tuple[int, int]) -> None:
    path = tmp_path / "narrow.png"
    Image.new("RGB", size).save(path)
    assert sorted(open_upload(path).size) == [1, LONGEST_SIDE]
