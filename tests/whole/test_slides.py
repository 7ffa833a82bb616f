"""Slides in bands of rows: levels, microns per pixel, and what is no slide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
import tifffile
import torch

from vision_ttt.errors import UserError
from vision_ttt.whole import Normalisation
from vision_ttt.whole.slides import SlidePicture

PLAIN = Normalisation([0.0] * 3, [1.0] * 3, largest=1)
PIXELS = np.random.default_rng(0).integers(0, 255, (600, 500, 3), dtype=np.uint8)
SAID = "Aperio Image Library v11\r\n500x600 [0,0 500x600] (64x64)|AppMag = 20"


@pytest.fixture
def slide(tmp_path: Path) -> Path:
    return write(tmp_path / "s.svs")


def write(path: Path, said: str = "|MPP = 0.5") -> Path:
    """An SVS file of three levels of 0.5, 2 and 8 microns per pixel."""
    stored: dict[str, Any] = {"tile": (64, 64), "photometric": "rgb", "compression": "zlib"}
    with tifffile.TiffWriter(path) as file:
        for step in (1, 4, 16):
            part = PIXELS[::step, ::step]
            kind = {"subfiletype": int(step > 1), "description": SAID + said, "metadata": None}
            file.write(part, **stored, **kind)
    return path


def wanted(step: int, first: int, last: int) -> torch.Tensor:
    return torch.from_numpy(PIXELS[::step, ::step][first:last].astype(np.float32)).permute(2, 0, 1)


def test_each_level_is_read_in_bands(slide: Path) -> None:
    identities = set()
    for level, step in enumerate((1, 4, 16)):
        picture = SlidePicture(slide, PLAIN, level=level)
        assert (picture.height, picture.width) == PIXELS[::step, ::step].shape[:2]
        assert picture.mpp == pytest.approx(0.5 * step, rel=0.02)
        for first, last in ((0, picture.height), (3, 30), (picture.height - 1, picture.height)):
            assert torch.equal(picture.read(first, last), wanted(step, first, last))
        identities.add(picture.identity)
    assert len(identities) == 3


@pytest.mark.parametrize(("mpp", "level"), [(0.49, 0), (0.5, 0), (1.99, 1), (7, 1), (100, 2)])
def test_the_coarsest_level_that_is_fine_enough_is_read(
    mpp: float, level: int, slide: Path
) -> None:
    assert SlidePicture(slide, PLAIN, mpp=mpp).level == level


def test_what_was_not_scanned_is_background(slide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = openslide.OpenSlide.read_region

    def transparent(self: openslide.OpenSlide, *region: Any) -> Any:
        image = read(self, *region)
        image.paste((0, 0, 0, 0), (10, 0, 20, 4))
        return image

    monkeypatch.setattr(openslide.OpenSlide, "read_region", transparent)
    found = SlidePicture(slide, PLAIN).read(0, 4)
    assert (found[:, :, 10:20] == 255).all()
    assert torch.equal(found[:, :, 20:], wanted(1, 0, 4)[:, :, 20:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": 3}, "level is 3; .*s.svs has the levels 0 to 2"),
        ({"level": 1, "mpp": 1}, "level is 1 and mpp 1; give one of them"),
        ({"mpp": 0.25}, "mpp is 0.25; the finest pixels of .*s.svs are 0.5 microns wide"),
    ],
)
def test_levels_that_are_not_there_are_refused(
    options: dict[str, Any], message: str, slide: Path
) -> None:
    with pytest.raises(UserError, match=message):
        SlidePicture(slide, PLAIN, **options)


def test_without_microns_a_level_has_to_be_given(tmp_path: Path) -> None:
    path = write(tmp_path / "s.svs", "")
    assert SlidePicture(path, PLAIN, level=1).mpp is None
    with pytest.raises(UserError, match="does not say how wide its pixels are; give level"):
        SlidePicture(path, PLAIN, mpp=0.5)


def _cut(path: Path) -> None:
    write(path)
    path.write_bytes(path.read_bytes()[:200_000])


def _damaged(path: Path) -> None:
    write(path)
    with tifffile.TiffFile(path) as file:
        offset = file.pages.first.dataoffsets[0]
    content = bytearray(path.read_bytes())
    content[offset : offset + 40] = bytes(40)
    path.write_bytes(content)


def _lying(path: Path) -> None:
    write(path)
    with tifffile.TiffFile(path, mode="r+") as file:
        file.pages.first.tags["ImageLength"].overwrite(10**9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b""), "cannot be read as a slide: Unsupported"),
        (lambda path: path.write_bytes(b"nothing of the kind"), "cannot be read as a slide"),
        (lambda path: path.mkdir(), "it is a folder"),
        (_cut, "cannot be read as a slide"),
        (_damaged, "cannot be read as a slide"),
        (_lying, "cannot be read as a slide"),
    ],
)
def test_what_is_no_slide_is_refused_in_a_line(make: Any, message: str, tmp_path: Path) -> None:
    make(tmp_path / "s.svs")
    with pytest.raises(UserError, match=message) as caught:
        SlidePicture(tmp_path / "s.svs", PLAIN).read(0, 9)
    assert "s.svs" in str(caught.value)
    assert "\n" not in str(caught.value)
