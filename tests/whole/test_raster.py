"""Files that GDAL opens, in bands of rows: bands, pixels without data, the place on the earth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import rasterio.control
import rasterio.shutil
import tifffile
import torch
from rasterio.transform import from_origin

from vision_ttt.errors import UserError
from vision_ttt.whole import Normalisation, raster
from vision_ttt.whole.raster import RasterPicture
from vision_ttt.whole.tiff import TiffPicture, write_mask

PLAIN = Normalisation([0.0] * 3, [1.0] * 3, largest=1)
PIXELS = np.random.default_rng(0).integers(1, 255, (3, 151, 133), dtype=np.uint8)
PLACE = {"crs": "EPSG:32633", "transform": from_origin(4e5, 5e6, 0.5, 0.25)}
TILES = {"tiled": True, "blockxsize": 64, "blockysize": 64}


def write(path: Path, pixels: np.ndarray = PIXELS, **stored: Any) -> Path:
    count, height, width = pixels.shape
    shape = {"count": count, "height": height, "width": width, "dtype": pixels.dtype}
    with rasterio.open(path, "w", **{"driver": "GTiff", **shape, **PLACE, **stored}) as file:
        file.write(pixels)
    return path


def wanted(pixels: np.ndarray, first: int, last: int) -> torch.Tensor:
    return torch.from_numpy(pixels[:, first:last].astype(np.float32))


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (np.uint8, {}),
        (np.uint16, {**TILES, "compress": "lzw", "interleave": "band"}),
        (np.int16, {**TILES, "compress": "zstd", "interleave": "pixel"}),
        (np.float32, {"driver": "COG", "blocksize": 128, "compress": "lzw"}),
        (np.uint8, {"driver": "ENVI"}),
    ],
    ids=str,
)
def test_rows_are_read_however_they_are_stored(
    dtype: type, stored: dict[str, Any], tmp_path: Path
) -> None:
    pixels = PIXELS.astype(dtype)
    picture = RasterPicture(write(tmp_path / "p.img", pixels, **stored), PLAIN)
    assert (picture.channels, picture.height, picture.width) == PIXELS.shape
    assert picture.has_gaps == (dtype == np.float32)
    for first, last in ((0, 151), (31, 97), (150, 151)):
        assert torch.equal(picture.read(first, last), wanted(pixels, first, last))


def test_bands_are_chosen_and_alpha_is_none(tmp_path: Path) -> None:
    alpha = np.full((1, 151, 133), 255, np.uint8)
    alpha[0, 40, :7] = 0
    path = write(
        tmp_path / "p.tif", np.concatenate([PIXELS, alpha]), photometric="rgb", alpha="yes"
    )
    picture = RasterPicture(path, PLAIN)
    assert (picture.channels, picture.has_gaps) == (3, True)
    assert (picture.has_data(39, 42) == torch.from_numpy(alpha[0, 39:42] > 0)).all()
    assert (picture.read(40, 41)[:, :, :7] == 0).all()
    chosen = RasterPicture(path, PLAIN, bands=[3, 1, 1])
    assert torch.equal(chosen.read(0, 9), wanted(PIXELS[[2, 0, 0]], 0, 9))
    assert chosen.identity != picture.identity


@pytest.mark.parametrize(
    ("dtype", "value"), [(np.uint8, 0), (np.float32, -9999.0), (np.float32, float("nan"))]
)
def test_no_data_becomes_the_mean(dtype: type, value: float, tmp_path: Path) -> None:
    pixels = PIXELS.astype(dtype)
    pixels[:, 50:60, 20:30] = value  # of all bands
    pixels[1, 70] = value  # of one
    path = write(tmp_path / "p.tif", pixels, nodata=value)
    normalisation = Normalisation([0.5, 0.4, 0.3], [0.2] * 3, largest=255)
    picture = RasterPicture(path, normalisation)
    read = picture.read(45, 75)
    assert (read[:, 5:15, 20:30] == 0).all()
    assert (read[1, 25] == 0).all()
    assert (read[0, 25] != 0).any()
    gaps = ~picture.has_data(45, 75)
    assert gaps.sum() == 100
    assert gaps[5:15, 20:30].all()
    # Without GDAL it is the same.
    other = TiffPicture(path, normalisation)
    assert torch.equal(other.read(45, 75), read)
    assert torch.equal(other.has_data(45, 75), ~gaps)


@pytest.mark.parametrize("suffix", ["tif", "img"])
def test_a_mask_lies_where_the_picture_does(suffix: str, tmp_path: Path) -> None:
    driver = {"driver": "HFA"} if suffix == "img" else {"nodata": 0}
    picture = RasterPicture(write(tmp_path / f"p.{suffix}", **driver), PLAIN)
    mask = torch.randint(0, 2, (151, 133), dtype=torch.uint8)
    named = {"classes": ["a", "b"], "colours": [(9, 8, 7), (255, 0, 0)]}
    where = {"geographic": picture.geographic, "has_gaps": picture.has_gaps}
    write_mask(tmp_path / "m.tif", [mask], (151, 133), **named, **where)
    with rasterio.open(tmp_path / "m.tif") as file:
        assert file.crs.to_epsg() == 32633
        assert file.transform == PLACE["transform"]
        assert file.nodata == (255 if suffix == "tif" else None)
        assert (file.read(1) == mask.numpy()).all()
        assert file.colormap(1)[1] == (255, 0, 0, 255)


def test_a_place_by_control_points_is_kept(tmp_path: Path) -> None:
    points = [
        rasterio.control.GroundControlPoint(row, column, 4e5 + column, 5e6 - row, 0)
        for row, column in ((0, 0), (0, 133), (151, 0))
    ]
    path = write(tmp_path / "p.tif", transform=None, gcps=points)
    where = {"geographic": RasterPicture(path, PLAIN).geographic}
    mask = torch.zeros(151, 133, dtype=torch.uint8)
    named = {"classes": ["a"], "colours": [(9, 8, 7)]}
    write_mask(tmp_path / "m.tif", [mask], (151, 133), **named, **where)
    with rasterio.open(tmp_path / "m.tif") as file:
        kept, system = file.gcps
    assert system.to_epsg() == 32633
    assert [(each.row, each.col, each.x, each.y) for each in kept] == [
        (each.row, each.col, each.x, each.y) for each in points
    ]


def test_another_source_is_another_picture(tmp_path: Path) -> None:
    """A killed run would resume with the pixels of both."""
    source = write(tmp_path / "a.tif")
    with rasterio.open(source) as file:
        rasterio.shutil.copy(file, tmp_path / "p.vrt", driver="VRT")
    before = RasterPicture(tmp_path / "p.vrt", PLAIN).identity
    (tmp_path / "a.tif.aux.xml").write_text("<PAMDataset></PAMDataset>")  # as viewers write it
    assert RasterPicture(tmp_path / "p.vrt", PLAIN).identity == before
    write(source, PIXELS[::-1])
    assert RasterPicture(tmp_path / "p.vrt", PLAIN).identity != before


def test_no_code_of_a_rasters_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDAL_VRT_ENABLE_PYTHON", "YES")
    write(tmp_path / "a.tif", PIXELS[:1])
    made = str(tmp_path / "ran")
    code = f"import os\ndef f(inputs, out, *more, **others):\n    os.mkdir({made!r})"
    (tmp_path / "p.vrt").write_text(
        '<VRTDataset rasterXSize="133" rasterYSize="151">'
        '<VRTRasterBand dataType="Byte" band="1" subClass="VRTDerivedRasterBand">'
        "<PixelFunctionType>f</PixelFunctionType>"
        "<PixelFunctionLanguage>Python</PixelFunctionLanguage>"
        f"<PixelFunctionCode>{code}</PixelFunctionCode>"
        '<SimpleSource><SourceFilename relativeToVRT="1">a.tif</SourceFilename>'
        "<SourceBand>1</SourceBand></SimpleSource></VRTRasterBand></VRTDataset>"
    )
    with pytest.raises(UserError, match=r"p\.vrt cannot be read as a raster"):
        RasterPicture(tmp_path / "p.vrt", Normalisation([0.0], [1.0])).read(0, 9)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["palette", "miniswhite"])
def test_pixels_that_are_no_grey_levels_are_refused(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "p.tif", PIXELS[:1], photometric=kind)
    with pytest.raises(UserError, match=rf"p\.tif has pixels of the kind {kind}; accepted"):
        RasterPicture(path, Normalisation([0.5], [0.5]))


def _cut(path: Path) -> None:
    write(path, **TILES)
    path.write_bytes(path.read_bytes()[:-5000])


def _lying(side: str) -> Any:
    """What writes a file of some bytes that says it has a side of a billion pixels."""

    def make(path: Path) -> None:
        stored = {"photometric": "rgb", "compression": "zlib", "rowsperstrip": 8}
        tifffile.imwrite(path, PIXELS.transpose(1, 2, 0), **stored)
        with tifffile.TiffFile(path, mode="r+") as file:
            file.pages.first.tags[side].overwrite(10**9)

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b""), "cannot be read as a raster"),
        (lambda path: path.write_bytes(b"nothing of the kind"), "cannot be read as a raster"),
        (lambda path: path.mkdir(), "it is a folder"),
        (lambda path: write(path, PIXELS[:1]), "has 1 channels, and mean and std are given"),
        (lambda path: write(path, PIXELS.astype(np.int32)), "pixels are int32; accepted: uint8"),
        (_cut, "cannot be read as a raster"),
        (_lying("ImageLength"), "cannot be read as a raster"),
        (_lying("ImageWidth"), "decoded as a whole"),
    ],
)
def test_what_is_no_picture_is_refused_in_a_line(make: Any, message: str, tmp_path: Path) -> None:
    make(tmp_path / "p.tif")
    with pytest.raises(UserError, match=message) as caught:
        RasterPicture(tmp_path / "p.tif", PLAIN)
    assert "p.tif" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_bands_and_large_blocks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "p.tif", **TILES)
    assert RasterPicture(path, PLAIN).memory == 104 * 2**20 + 2 * 64 * 64 * 3
    with pytest.raises(ValueError, match=r"bands are \[0, 1, 2\]; .* has 1 to 3"):
        RasterPicture(path, PLAIN, bands=[0, 1, 2])
    monkeypatch.setattr(raster, "LARGEST_SEGMENT", 10_000)
    with pytest.raises(ValueError, match="has blocks of 64 × 64 pixels"):
        RasterPicture(path, PLAIN)
