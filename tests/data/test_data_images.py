"""Images decode to 8-bit RGB, or fail with their name."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vision_ttt.data import ImageError, find_images, open_image


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK"])
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "image.tif"
    Image.new("RGB", (5, 3), (200, 100, 50)).convert(mode).save(path)
    image = open_image(path)
    assert (image.mode, image.size) == ("RGB", (5, 3))


def test_16_bit_grey_is_scaled_not_clipped(tmp_path: Path) -> None:
    levels = np.array([[0, 256, 32768, 65535]], dtype=np.uint16)
    Image.fromarray(levels).save(tmp_path / "deep.png")
    assert np.asarray(open_image(tmp_path / "deep.png"))[0, :, 0].tolist() == [0, 1, 128, 255]


def _truncated(path: Path) -> None:
    Image.effect_noise((64, 64), 50).save(path)
    path.write_bytes(path.read_bytes()[:200])


def _corrupt_chunk(path: Path) -> None:
    Image.effect_noise((64, 64), 50).save(path)
    content = bytearray(path.read_bytes())
    content[60:90] = bytes(30)
    path.write_bytes(content)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _text(path: Path) -> None:
    path.write_text("not an image")


DAMAGES = [
    (damage, suffix)
    for damage in (_truncated, _empty, _text)
    for suffix in (".png", ".jpg", ".bmp")
]


@pytest.mark.parametrize(("damage", "suffix"), [*DAMAGES, (_corrupt_chunk, ".png")])
def test_damaged_image_is_named(tmp_path: Path, damage, suffix: str) -> None:
    path = tmp_path / f"broken{suffix}"
    damage(path)
    with pytest.raises(ImageError, match="broken") as caught:
        open_image(path)
    assert caught.value.name == str(path)


def test_decompression_bomb_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("L", (100, 100)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ImageError, match=r"bomb\.png"):
        open_image(tmp_path / "bomb.png")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.png"):
        open_image(tmp_path / "nowhere.png")


def test_error_survives_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(ImageError("a.png", "why")))
    assert (error.name, error.reason) == ("a.png", "why")


def test_find_images_looks_below_and_ignores_other_files(image_folder: Path) -> None:
    (image_folder / "notes.txt").write_text("")
    assert len(find_images(image_folder)) == 24
    (image_folder / "none").mkdir()
    with pytest.raises(ImageError, match="none"):
        find_images(image_folder / "none")
