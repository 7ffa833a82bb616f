"""Images decode to 8-bit RGB, or fail with their name."""

import os
import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, ExifTags, Image, ImageOps

from vision_ttt.data import DatasetError, ImageError, open_image
from vision_ttt.data.image_files import find_images
from vision_ttt.data.images import FORMATS, open_labelled


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK"])
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "image.tif"
    stored = Image.new("RGB", (5, 3), (200, 100, 50)).convert(mode)
    stored.save(path)
    image = open_image(path)
    assert image.mode == "RGB"
    assert np.array_equal(image, stored.convert("RGB"))


def test_16_bit_grey_is_scaled_not_clipped(tmp_path: Path) -> None:
    levels = np.array([[0, 256, 32768, 65535]], dtype=np.uint16)
    Image.fromarray(levels).save(tmp_path / "deep.png")
    assert np.asarray(open_image(tmp_path / "deep.png"))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_16_bit_grey_may_have_transparent_pixels(tmp_path: Path) -> None:
    levels = np.array([[0, 20000, 65535]], dtype=np.uint16)
    Image.fromarray(levels).save(tmp_path / "deep.png", transparency=20000)
    assert np.asarray(open_image(tmp_path / "deep.png"))[0, :, 0].tolist() == [0, 255, 255]


def test_16_bit_grey_may_begin_with_white(tmp_path: Path) -> None:
    path = tmp_path / "deep.tif"
    Image.fromarray(np.array([[0, 20000, 65535]], dtype=np.uint16)).save(path)
    black_is_zero = b"\x06\x01\x03\0\x01\0\0\0\x01\0"  # a tag, its type, count and value
    assert path.read_bytes().count(black_is_zero) == 1
    path.write_bytes(path.read_bytes().replace(black_is_zero, black_is_zero[:-2] + b"\0\0"))
    assert np.asarray(open_image(path))[0, :, 0].tolist() == [255, 177, 0]


def test_12_bit_grey_is_scaled(tmp_path: Path) -> None:
    tags = {256: 2, 257: 1, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: 3}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    pixels = b"\xff\xf8\x00\0"  # 4095 and 2048
    content = b"II*\0" + struct.pack("<I", 12) + pixels + struct.pack("<H", len(tags)) + entries
    (tmp_path / "deep.tif").write_bytes(content + bytes(4))
    assert np.asarray(open_image(tmp_path / "deep.tif"))[0, :, 0].tolist() == [255, 128]


def test_32_bit_grey(tmp_path: Path) -> None:
    """Taken for 16 bits where it can be nothing else; there is no white in the others."""
    path = tmp_path / "deep.tif"
    Image.fromarray(np.array([[0, 256, 65535]], dtype=np.int32)).save(path)
    assert np.asarray(open_image(path))[0, :, 0].tolist() == [0, 1, 255]
    for levels in ([0, 255], [0, 65536], [-1, 256]):
        Image.fromarray(np.array([levels], dtype=np.int32)).save(path)
        with pytest.raises(ImageError, match=rf"deep\.tif.* from {levels[0]} to {levels[1]}, "):
            open_image(path)
    Image.fromarray(np.array([[0, 0.5]], dtype=np.float32)).save(path)
    with pytest.raises(ImageError, match=r"32-bit numbers from 0 to 0\.5"):
        open_image(path)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(tmp_path: Path, mode: str) -> None:
    drawing = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    drawing.putpixel((1, 0), (0, 0, 0, 255))
    drawing.convert(mode).save(tmp_path / "icon.png")
    assert np.asarray(open_image(tmp_path / "icon.png"))[0, :, 0].tolist() == [255, 0]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_upright(tmp_path: Path, orientation: int) -> None:
    """As Pillow's own function turns them; labels decide where they have the stored size."""
    noise = Image.effect_noise((5, 3), 90)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    path = tmp_path / "photograph.png"
    noise.save(path, exif=exif)
    stored, upright = noise.convert("RGB"), ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    fitting = upright if upright.size == (3, 5) else stored
    for image, wanted in (
        (open_image(path), upright),
        (open_image(path, upright=False), stored),
        (open_labelled(path, (5, 3)), stored),
        (open_labelled(path, (3, 5)), fitting),
    ):
        assert np.array_equal(np.asarray(image), np.asarray(wanted))


def test_damaged_exif_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "photograph.jpg"
    Image.new("RGB", (5, 3), (200, 100, 50)).save(path, exif=b"Exif\0\0nothing of the kind")
    assert open_image(path).size == (5, 3)


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


@pytest.mark.parametrize("suffix", [".eps", ".png"])
def test_what_pillow_would_start_a_program_for_is_refused(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the file is called: Pillow goes by its content, and gives EPS to Ghostscript."""
    started = tmp_path / "started"
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {started}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    path = tmp_path / f"drawing{suffix}"
    Image.new("RGB", (9, 9)).save(path, "EPS")
    with pytest.raises(ImageError, match=r"drawing.* not an image of PNG, JPEG"):
        open_image(path)
    assert not started.exists()


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_that_is_named_is_read(tmp_path: Path, name: str) -> None:
    if name not in Image.SAVE:
        pytest.skip("this Pillow was built without it")
    Image.new("RGB", (16, 16), (200, 100, 50)).save(tmp_path / "image", name)
    assert open_image(tmp_path / "image").size == (16, 16)


def test_what_is_no_file_is_refused_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr(Image, "open", None)  # would wait for ever
    with pytest.raises(ImageError, match=r"pipe\.png: it is a named pipe, not a file"):
        open_image(tmp_path / "pipe.png")
    with pytest.raises(ImageError, match=r"folder\.png: it is a folder, not a file"):
        open_image(str(tmp_path / "folder.png"))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has none")
def test_the_systems_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/self")
    for folder in ("/proc/self", tmp_path / "link"):
        with pytest.raises(DatasetError, match=r"the folder .* is in /proc or /sys"):
            find_images(folder)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.png"):
        open_image(tmp_path / "nowhere.png")


def test_error_survives_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(ImageError("a.png", "why")))
    assert (error.name, error.reason) == ("a.png", "why")


def test_find_images_looks_below_and_ignores_other_files(image_folder: Path) -> None:
    (image_folder / "notes.txt").write_text("")
    assert len(find_images(image_folder)) == 24
    for name in ("a.gif", "b.avif", "c.JP2"):
        (image_folder / name).touch()
    assert len(find_images(image_folder)) == 27
    (image_folder / "none").mkdir()
    with pytest.raises(DatasetError, match=r"^no image in the folder .*none \(accepted: \.jpg,"):
        find_images(image_folder / "none")


def test_find_images_follows_links_but_not_round_in_circles(image_folder: Path) -> None:
    (image_folder / "train" / "more").symlink_to(image_folder / "val")
    (image_folder / "train" / "gone.png").symlink_to("nowhere.png")
    paths = find_images(image_folder / "train")
    assert paths == sorted(paths)
    assert len(paths) == 24
    (image_folder / "train" / "up").symlink_to("..")
    with pytest.raises(DatasetError, match="leads to a folder that it lies in"):
        find_images(image_folder)


def test_find_images_leaves_out_what_is_hidden(image_folder: Path) -> None:
    dark = image_folder / "val" / "dark"
    shutil.copytree(dark, image_folder / "val" / ".thumbnails")
    shutil.copy(dark / "0.png", dark / "._0.png")
    assert len(find_images(image_folder / "val")) == 8
    assert len(find_images(image_folder / "val" / ".thumbnails")) == 4  # as it was asked for
