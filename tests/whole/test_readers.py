"""Which reader opens a file, and what is said where none does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from packaging.requirements import Requirement

from vision_ttt import extras
from vision_ttt.errors import UserError
from vision_ttt.extras import MissingPackageError
from vision_ttt.whole import ArrayPicture, Normalisation, readers
from vision_ttt.whole.readers import open_picture, reader_of
from vision_ttt.whole.tiff import TiffPicture

PLAIN = Normalisation([0.0] * 3, [1.0] * 3, largest=1)
PIXELS = np.zeros((20, 30, 3), np.uint8)
PLACE = [(33550, "d", 3, (0.5, 0.5, 0.0), True)]


def _installed(monkeypatch: pytest.MonkeyPatch, *, rasterio: bool) -> None:
    monkeypatch.setattr(readers, "find_spec", lambda name: name if rasterio else None)


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        *(("p.npy", "array"), ("p.tiff", "tiff"), ("p.JP2", "raster"), ("p.svs", "slide")),
        *(("p.mrxs", "slide"), ("p.ome.zarr", "zarr"), ("p.ome.tif", "tiff")),
    ],
)
def test_the_suffix_selects_the_reader(
    name: str, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed(monkeypatch, rasterio=False)
    assert reader_of(Path(name)) == reader
    assert reader_of(Path(name), "raster") == "raster"


def test_a_geotiff_is_a_raster_where_rasterio_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, placed = tmp_path / "a.tif", tmp_path / "b.tif"
    tifffile.imwrite(plain, PIXELS, photometric="rgb")
    tifffile.imwrite(placed, PIXELS, photometric="rgb", extratags=PLACE)
    for rasterio, reader in ((True, "raster"), (False, "tiff")):
        _installed(monkeypatch, rasterio=rasterio)
        assert (reader_of(plain), reader_of(placed)) == ("tiff", reader)
    assert reader_of(placed, raster=True) == "raster"
    assert isinstance(open_picture(placed, PLAIN), TiffPicture)


def test_arrays_are_opened_as_maps(tmp_path: Path) -> None:
    np.save(tmp_path / "p.npy", PIXELS)
    picture = open_picture(tmp_path / "p.npy", PLAIN)
    assert isinstance(picture, ArrayPicture)
    assert isinstance(picture.pixels, np.memmap)
    with (tmp_path / "z.npy").open("wb") as file:
        np.savez(file, PIXELS)
    (tmp_path / "p.npy").write_bytes(b"nothing of the kind")
    for name in ("p.npy", "z.npy"):
        with pytest.raises(UserError, match=rf"{name} is no array of numbers"):
            open_picture(tmp_path / name, PLAIN)
    with pytest.raises(FileNotFoundError):
        open_picture(tmp_path / "q.npy", PLAIN)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("p.gif", {}, "no reader is for p.gif; accepted: array .npy; tiff .tif .tiff (pip"),
        ("p.gif", {}, "slide .svs .ndpi .mrxs .scn .bif .svslide .vms .vmu (pip install"),
        ("p", {"reader": "gdal"}, "reader is 'gdal'; accepted: array, tiff, raster, slide, zarr"),
        ("p.npy", {"level": 1}, "level is not for p.npy, which the reader array opens; it is for"),
        ("p.svs", {"bands": [1]}, "it is for the readers raster"),
    ],
)
def test_what_no_reader_is_for_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        open_picture(name, PLAIN, **options)
    assert "\n" not in str(caught.value)


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_requirements", lambda extra: [Requirement(f"a-{extra}")])
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    for name, extra in (
        ("p.tif", "large"),
        ("p.jp2", "geo"),
        ("p.svs", "slides"),
        ("p.zarr", "zarr"),
    ):
        _installed(monkeypatch, rasterio=False)
        with pytest.raises(MissingPackageError, match=rf"pip install 'vision-ttt\[{extra}\]'"):
            open_picture(name, PLAIN)
