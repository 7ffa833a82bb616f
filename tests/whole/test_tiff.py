"""TIFF files in bands of rows: whatever way they are stored, and what is no picture."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch

from vision_ttt.errors import UserError
from vision_ttt.whole import Normalisation
from vision_ttt.whole import tiff as tiff_files
from vision_ttt.whole.tiff import TiffPicture, write_mask

PLAIN = Normalisation([0.0] * 3, [1.0] * 3, largest=1)
PIXELS = np.random.default_rng(0).integers(0, 255, (151, 133, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    "dtype",
    [np.uint16, *(pytest.param(each, marks=pytest.mark.slow) for each in (np.uint8, np.float32))],
)
@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"tile": (64, 32)},
        {"rowsperstrip": 17},
        {"rowsperstrip": 17, "compression": "zlib"},
        {"planarconfig": "separate"},
        {"planarconfig": "separate", "tile": (32, 64), "compression": "zlib"},
        {"bigtiff": True, "byteorder": ">"},
        {"byteorder": ">", "tile": (32, 32)},
    ],
    ids=str,
)
def test_rows_are_read_however_they_are_stored(
    stored: dict[str, Any], dtype: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = PIXELS.astype(dtype)
    separate = stored.get("planarconfig") == "separate"
    given = pixels.transpose(2, 0, 1) if separate else pixels
    tifffile.imwrite(tmp_path / "p.tif", given, photometric="rgb", **stored)
    for largest in (2**20, 1):  # of a row of tiles that is kept
        monkeypatch.setattr(tiff_files, "LARGEST_ROW", largest)
        picture = TiffPicture(tmp_path / "p.tif", PLAIN)
        assert (picture.height, picture.width, picture.channels) == PIXELS.shape
        for first, last in ((0, 151), (31, 97), (40, 50), (150, 151), (40, 40)):
            wanted = torch.from_numpy(pixels[first:last].astype(np.float32)).permute(2, 0, 1)
            assert torch.equal(picture.read(first, last), wanted)


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_picture_that_is_not_upright_is_refused(orientation: int, tmp_path: Path) -> None:
    path = tmp_path / "p.tif"
    tag = (274, "H", 1, orientation, True)
    tifffile.imwrite(path, PIXELS, photometric="rgb", extratags=[tag])
    if orientation == 1:
        assert TiffPicture(path, PLAIN).height == len(PIXELS)
    else:
        with pytest.raises(
            UserError, match=r"p\.tif .*its orientation is 6.* Save it upright first"
        ):
            TiffPicture(path, PLAIN)


def test_tiles_are_decoded_once_for_bands_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"tile": (64, 32), "compression": "zlib", "photometric": "rgb"}
    tifffile.imwrite(tmp_path / "p.tif", PIXELS, **options)
    picture, page = TiffPicture(tmp_path / "p.tif", PLAIN), tifffile.TiffPage
    assert picture.memory == 64 * 133 * 3 + 3 * 64 * 32 * 3  # a row of tiles, and one as it comes
    decoded, decode = [], page.decode.func

    def counting(page: Any) -> Any:
        found = decode(page)
        return lambda data, index, **others: decoded.append(index) or found(data, index, **others)

    monkeypatch.setattr(page, "decode", property(counting))
    for first in range(0, 151, 10):
        picture.read(first, min(first + 10, 151))
    assert decoded == [*range(3 * 5)]


def test_the_memory_of_a_strip_that_is_not_kept_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiff_files, "LARGEST_ROW", 100)
    tifffile.imwrite(tmp_path / "p.tif", PIXELS, compression="zlib", rowsperstrip=151)
    assert TiffPicture(tmp_path / "p.tif", PLAIN).memory == 3 * PIXELS.nbytes
    tifffile.imwrite(tmp_path / "p.tif", PIXELS, rowsperstrip=151)
    assert TiffPicture(tmp_path / "p.tif", PLAIN).memory == 0  # nothing is decoded


def test_of_a_pyramid_the_full_resolution_is_read(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "p.ome.tif") as writer:
        writer.write(PIXELS, subifds=1, tile=(32, 32), photometric="rgb")
        writer.write(PIXELS[::2, ::2], subfiletype=1, tile=(32, 32), photometric="rgb")
    picture = TiffPicture(tmp_path / "p.ome.tif", PLAIN)
    wanted = torch.from_numpy(PIXELS[:5].astype(np.float32)).permute(2, 0, 1)
    assert torch.equal(picture.read(0, 5), wanted)


def test_another_file_has_another_identity(tmp_path: Path) -> None:
    for name in ("a.tif", "b.tif"):
        tifffile.imwrite(tmp_path / name, PIXELS)
    first, second = (TiffPicture(tmp_path / name, PLAIN).identity for name in ("a.tif", "b.tif"))
    assert first != second


@pytest.mark.parametrize(
    ("dtype", "text", "value"),
    [
        (np.uint8, "7", 7),
        (np.float32, "-9999", -9999.0),
        (np.float32, "nan", np.nan),
        (np.uint8, "-9999", None),
        (np.uint8, "7.5", None),
    ],
)
def test_no_data_becomes_the_mean(
    dtype: type, text: str, value: float | None, tmp_path: Path
) -> None:
    pixels = np.full((40, 30, 3), 100, dtype)
    if value is not None:
        pixels[10:12, 5:9] = value  # of all channels
        pixels[20, :, 1] = value
    tags = [(42113, "s", 0, text, True)]
    tifffile.imwrite(tmp_path / "p.tif", pixels, photometric="rgb", extratags=tags)
    picture = TiffPicture(tmp_path / "p.tif", Normalisation([0.5] * 3, [0.2] * 3, largest=255))
    assert picture.has_gaps == (value is not None)
    read = picture.read(0, 40)
    assert (read == 0).sum() == (0 if value is None else 3 * 8 + 30)
    if value is not None:
        assert (read[:, 10:12, 5:9] == 0).all()
        assert (~picture.has_data(9, 21)).sum() == 8
    assert TiffPicture(tmp_path / "p.tif", picture.normalisation).geographic == []


def _lying(path: Path) -> None:
    """A file of some bytes that says it has a billion pixels."""
    tifffile.imwrite(path, PIXELS, photometric="rgb")
    with tifffile.TiffFile(path, mode="r+") as file:
        file.pages.first.tags["ImageLength"].overwrite(10**9)


def _cut(path: Path) -> None:
    tifffile.imwrite(path, PIXELS, photometric="rgb", tile=(32, 32))
    path.write_bytes(path.read_bytes()[:-5000])


def _damaged(path: Path) -> None:
    tifffile.imwrite(path, PIXELS, photometric="rgb", tile=(32, 32), compression="zlib")
    with tifffile.TiffFile(path) as file:
        offset = file.pages.first.dataoffsets[0]
    content = bytearray(path.read_bytes())
    content[offset : offset + 40] = bytes(40)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(b""), "cannot be read as TIFF"),
        (lambda path: path.write_bytes(b"II*\0" + struct.pack("<I", 9999)), "cannot be read as"),
        (
            lambda path: tifffile.imwrite(path, PIXELS[..., 0]),
            "has 1 channels, and mean and std are given",
        ),
        (
            lambda path: tifffile.imwrite(path, PIXELS.astype(np.float64), photometric="rgb"),
            "pixels are float64",
        ),
        (lambda path: path.mkdir(), "it is a folder"),
        (_lying, "it says it has 133 × 1000000000 pixels"),
        (_cut, "is truncated"),
        (_damaged, "cannot be read as TIFF"),
    ],
)
def test_what_is_no_picture_is_refused_in_a_line(write: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path / "p.tif")
    with pytest.raises(UserError, match=message) as caught:
        TiffPicture(tmp_path / "p.tif", PLAIN).read(0, 9)
    assert "p.tif" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_strip_that_would_be_decoded_whole_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiff_files, "LARGEST_SEGMENT", 50_000)
    stored = {"compression": "zlib", "rowsperstrip": 151, "photometric": "rgb"}
    tifffile.imwrite(tmp_path / "p.tif", PIXELS, **stored)
    with pytest.raises(UserError, match="a strip of 151 × 133 pixels, which is decoded as a whole"):
        TiffPicture(tmp_path / "p.tif", PLAIN)


@pytest.mark.parametrize("size", [(600, 300), (256, 512), (3, 2)])
def test_a_mask_is_written_in_tiles(size: tuple[int, int], tmp_path: Path) -> None:
    mask = torch.randint(0, 3, size, dtype=torch.uint8)
    colours = [(0, 0, 0), (255, 0, 0), (0, 0, 255)]
    named = {"classes": ["a", "é", "c"], "colours": colours}
    write_mask(tmp_path / "m.tif", mask.split(100), size, **named)
    assert (tifffile.imread(tmp_path / "m.tif") == mask.numpy()).all()
    with pytest.raises(ValueError, match="have more rows than the mask"):
        write_mask(tmp_path / "n.tif", [mask, mask], size, **named)


def test_a_mask_is_written_before_its_bands_end(tmp_path: Path) -> None:
    """Their end removes the scratch folder of the run."""

    def bands() -> Iterator[torch.Tensor]:
        yield torch.zeros(9, 7, dtype=torch.uint8)
        assert tifffile.imread(tmp_path / "m.tif").shape == (9, 7)

    write_mask(tmp_path / "m.tif", bands(), (9, 7), classes=["a"], colours=[(0, 0, 0)])


@pytest.mark.parametrize("kind", ["miniswhite", "palette", "ycbcr"])
def test_pixels_that_are_no_grey_levels_are_refused(kind: str, tmp_path: Path) -> None:
    colours = np.zeros((3, 256), np.uint16) if kind == "palette" else None
    pixels = PIXELS if kind == "ycbcr" else PIXELS[..., 0]
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric=kind, colormap=colours)
    with pytest.raises(UserError, match=f"pixels of the kind {kind.upper()}; accepted"):
        TiffPicture(tmp_path / "a.tif", Normalisation((0.5,), (0.5,)))


@pytest.mark.parametrize(
    "stored", [{"tile": (32, 32), "compression": "zlib"}, {"rowsperstrip": 64}]
)
def test_what_a_sparse_file_leaves_out_has_no_data(stored: dict[str, Any], tmp_path: Path) -> None:
    path, tag = tmp_path / "p.tif", (42113, "s", 0, "255", True)
    pixels = np.full((64, 32, 3), 7, np.uint8)
    tifffile.imwrite(path, pixels, photometric="rgb", extratags=[tag], **stored)
    with tifffile.TiffFile(path, mode="r+b") as file:
        for name in ("Offsets", "ByteCounts"):
            entry = file.pages[0].tags[("Tile" if "tile" in stored else "Strip") + name]
            entry.overwrite([*entry.value[:-1], 0])  # the last tile, or the only strip
    picture = TiffPicture(path, PLAIN)
    given = picture.has_data(0, 64)
    assert given[:32].all() == ("tile" in stored)
    assert not given[32:].any()
