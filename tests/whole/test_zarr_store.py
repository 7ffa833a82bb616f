"""OME-Zarr pictures in bands of rows, what is none, and tokens written as Zarr."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from vision_ttt.errors import UserError
from vision_ttt.whole import Normalisation, zarr_store
from vision_ttt.whole.zarr_store import ZarrPicture, write_features

PLAIN = Normalisation([0.0] * 3, [1.0] * 3, largest=1)
PIXELS = np.random.default_rng(0).integers(0, 60_000, (3, 61, 53), dtype=np.uint16)


def write(
    path: Path,
    axes: str = "cyx",
    *,
    zarr_format: int = 2,
    pixels: np.ndarray = PIXELS,
    said: dict[str, Any] | None = None,
    **stored: Any,
) -> Path:
    """An OME-Zarr picture of two levels of 0.5 and 1 microns per pixel."""
    group = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    datasets = []
    for level, step in enumerate((1, 2)):
        sizes = dict(zip("cyx", pixels[:, ::step, ::step].shape, strict=True))
        order = [name for name in axes if name in "cyx"]
        order = order if "c" in order else ["c", *order]
        part = pixels[:, ::step, ::step].transpose(["cyx".index(name) for name in order])
        part = part.reshape([sizes.get(name, 1) for name in axes])
        chunks = [1 if name in "tcz" else 16 for name in axes]
        array = group.create_array(
            str(level), shape=part.shape, chunks=chunks, dtype=part.dtype, **stored
        )
        array[:] = part
        scale = [0.5 * step if name in "xy" else 1.0 for name in axes]
        transforms = [{"type": "scale", "scale": scale}]
        datasets.append({"path": str(level), "coordinateTransformations": transforms})
    unit = {"type": "space", "unit": "micrometer"}
    described = [{"name": name, **(unit if name in "xyz" else {})} for name in axes]
    scales = {"axes": described, "datasets": datasets, **(said or {})}
    attributes = {"multiscales": [scales]}
    group.attrs.update({"ome": attributes} if zarr_format == 3 else attributes)
    return path


def wanted(step: int, first: int, last: int) -> torch.Tensor:
    return torch.from_numpy(PIXELS[:, ::step, ::step][:, first:last].astype(np.float32))


@pytest.mark.parametrize(
    ("axes", "stored"),
    [
        ("tczyx", {}),
        ("yxc", {"zarr_format": 3}),
        ("cyx", {"zarr_format": 3, "shards": (3, 32, 32)}),
        ("xcy", {"order": "F"}),
    ],
    ids=str,
)
def test_levels_are_read_whatever_the_order_of_axes(
    axes: str, stored: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path / "p.zarr", axes, **stored)
    for options, step in (({}, 1), ({"level": 1}, 2), ({"mpp": 1.4}, 2), ({"mpp": 0.5}, 1)):
        picture = ZarrPicture(path, PLAIN, **options)
        assert picture.mpp == 0.5 * step
        assert (picture.channels, picture.height) == (3, -(-61 // step))
        for first, last in ((0, picture.height), (7, 25)):
            assert torch.equal(picture.read(first, last), wanted(step, first, last))


def test_older_ones_and_those_without_channels_are_read(tmp_path: Path) -> None:
    plain = Normalisation([0.0], [1.0], largest=1)
    path = write(tmp_path / "a.zarr", "yx", pixels=PIXELS[:1], said={"axes": ["y", "x"]})
    picture = ZarrPicture(path, plain)  # 0.3
    assert picture.mpp is None
    assert torch.equal(picture.read(2, 5), wanted(1, 2, 5)[:1])
    path = write(tmp_path / "b.zarr", "tczyx", said={"axes": None})  # 0.1
    assert torch.equal(ZarrPicture(path, PLAIN).read(2, 5), wanted(1, 2, 5))
    with pytest.raises(UserError, match="does not say how wide its pixels are"):
        ZarrPicture(path, PLAIN, mpp=1)


def test_a_scale_of_all_levels_multiplies_that_of_each(tmp_path: Path) -> None:
    transforms = [{"type": "scale", "scale": [1, 3, 3]}]
    path = write(tmp_path / "p.zarr", "cyx", said={"coordinateTransformations": transforms})
    assert ZarrPicture(path, PLAIN, level=1).mpp == 3.0


@pytest.mark.parametrize(("unit", "microns"), [("nanometer", 1e-3), ("millimeter", 1e3)])
def test_the_scale_along_x_in_its_unit_counts(unit: str, microns: float, tmp_path: Path) -> None:
    axes = [{"name": name, "type": "space", "unit": unit} for name in "cyx"]
    transforms = [{"type": "scale", "scale": [1, 5, 3]}]
    said = {"axes": axes, "coordinateTransformations": transforms}
    picture = ZarrPicture(write(tmp_path / "p.zarr", said=said), PLAIN)
    assert picture.mpp == pytest.approx(1.5 * microns)


def test_another_content_has_another_identity(tmp_path: Path) -> None:
    path = write(tmp_path / "p.zarr")
    before = ZarrPicture(path, PLAIN)
    assert ZarrPicture(path, PLAIN).identity == before.identity
    assert ZarrPicture(path, PLAIN, level=1).identity != before.identity
    os.utime(path / "0" / "0.0.0", (1, 1))
    assert ZarrPicture(path, PLAIN).identity != before.identity


def _without(name: str) -> Any:
    return lambda path: (write(path) / name).unlink()


def _lying(path: Path) -> None:
    described = json.loads((write(path) / "0" / ".zarray").read_text())
    (path / "0" / ".zarray").write_text(json.dumps({**described, "chunks": [1, 10**9, 10**9]}))


def _damaged(path: Path) -> None:
    write(path)
    (path / "0" / "0.0.0").write_bytes(b"nothing of the kind")


def _collection(path: Path) -> None:
    zarr.open_group(path, mode="w").attrs["bioformats2raw.layout"] = 3
    write(path / "0")


def _pipe(path: Path) -> None:
    (write(path) / "0" / "0.0.0").unlink()
    os.mkfifo(path / "0" / "0.0.0")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b""), "is no folder; an OME-Zarr picture is one"),
        (lambda path: path.mkdir(), "cannot be read as OME-Zarr"),
        (lambda path: zarr.open_group(path, mode="w"), "has no multiscales"),
        (lambda path: write(path, said={"datasets": [{"path": "9"}]}), "as OME-Zarr: '9'"),
        (lambda path: write(path, said={"datasets": 3}), "cannot be read as OME-Zarr"),
        (lambda path: write(path, "zyx", pixels=PIXELS[:1]), "has 1 channels, and mean"),
        (lambda path: write(path, said={"axes": [*"zyx"]}), "has the axes z 3, y 61, x 53; acc"),
        (
            lambda path: write(path, "cyx", pixels=PIXELS[..., :1], said={"axes": [*"cyz"]}),
            "has the axes c 3, y 61, z 1; accepted",
        ),
        (_collection, "collection of bioformats2raw; name one of its pictures, such as .*/0$"),
        (lambda path: write(path, pixels=PIXELS.astype(np.int64)), "pixels are int64"),
        (_without(".zgroup"), "cannot be read as OME-Zarr"),
        (_without("0/.zarray"), "cannot be read as OME-Zarr"),
        (_lying, "has chunks of"),
        (_damaged, "cannot be read as OME-Zarr"),
        (_pipe, "is a named pipe"),
    ],
)
def test_what_is_no_picture_is_refused_in_a_line(make: Any, message: str, tmp_path: Path) -> None:
    make(tmp_path / "p.zarr")
    with pytest.raises(UserError, match=message) as caught:
        ZarrPicture(tmp_path / "p.zarr", PLAIN).read(0, 9)
    assert "p.zarr" in str(caught.value)
    assert "\n" not in str(caught.value)


class _Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("place", ["compressor", "filters"])
@pytest.mark.parametrize("dtype", ["<u2", "|O"])
def test_no_code_of_a_pictures_is_run(dtype: str, place: str, tmp_path: Path) -> None:
    path = write(tmp_path / "p.zarr")
    described = json.loads((path / "0" / ".zarray").read_text())
    codec = {"id": "pickle", "protocol": 5}
    changed = {"compressor": None, place: [codec] if place == "filters" else codec}
    (path / "0" / ".zarray").write_text(json.dumps({**described, **changed, "dtype": dtype}))
    (path / "0" / "0.0.0").write_bytes(pickle.dumps(_Canary(tmp_path / "ran")))
    with pytest.raises(UserError, match="cannot be read as OME-Zarr"):
        ZarrPicture(path, PLAIN).read(0, 9)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tokens_are_written_in_chunks(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zarr_store, "_CHUNK", 16)
    tokens, path = torch.randn(10, 9, 6), tmp_path / "t.zarr"
    bands = [(slice(first, first + 4), tokens[first : first + 4]) for first in (0, 4, 8)]
    for _ in range(2):  # over the former ones, too
        assert write_features(path, bands, 10, dtype=dtype, about={"model": "x"}) == (10, 9, 6)
    array = zarr.open_array(path, mode="r")
    assert array.chunks == (4, 4, 6)
    assert array.metadata.dimension_names == ("y", "x", "feature")
    assert dict(array.attrs) == {"model": "x"}
    assert torch.equal(torch.from_numpy(array[:]), tokens.to(dtype))
    assert [each.name for each in tmp_path.iterdir()] == ["t.zarr"]


def test_tokens_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path, tokens = tmp_path / "t.zarr", torch.full((2, 3, 4), 7e4)
    with pytest.raises(UserError, match=r"a token is not finite in torch\.float16"):
        write_features(path, [(slice(0, 2), tokens)], 2)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(UserError, match=r"dtype is torch\.int8"):
        write_features(path, [(slice(0, 2), tokens)], 2, dtype=torch.int8)
    path.mkdir()
    (path / "own").touch()
    with pytest.raises(UserError, match="holds no tokens written before"):
        write_features(path, [(slice(0, 2), tokens)], 2, dtype=torch.float32)
    assert (path / "own").exists()


def test_tokens_are_written_before_their_bands_end(tmp_path: Path) -> None:
    """Their end removes the scratch folder of the run. A link names the folder that is written."""
    tokens, path, link = torch.randn(2, 3, 6), tmp_path / "t.zarr", tmp_path / "link.zarr"
    link.symlink_to(path)

    def bands() -> Iterator[tuple[slice, torch.Tensor]]:
        yield slice(0, 2), tokens
        assert torch.equal(torch.from_numpy(zarr.open_array(path, mode="r")[:]), tokens)

    for _ in range(2):
        tokens = tokens + 1
        write_features(link, bands(), 2, dtype=torch.float32)
    assert {*tmp_path.iterdir()} == {path, link}


def test_a_run_that_is_refused_leaves_the_tokens_of_another(tmp_path: Path) -> None:
    tokens, path = torch.randn(4, 3, 6), tmp_path / "t.zarr"

    def refused() -> Iterator[tuple[slice, torch.Tensor]]:
        raise BlockingIOError
        yield

    def bands() -> Iterator[tuple[slice, torch.Tensor]]:
        yield slice(0, 2), tokens[:2]
        with pytest.raises(BlockingIOError):
            write_features(path, refused(), 4)
        yield slice(2, 4), tokens[2:]

    write_features(path, bands(), 4, dtype=torch.float32)
    assert torch.equal(torch.from_numpy(zarr.open_array(path, mode="r")[:]), tokens)


def test_another_zarr_is_not_replaced_by_tokens(tmp_path: Path) -> None:
    path = tmp_path / "picture.zarr"
    zarr.create_group(path, zarr_format=3)
    with pytest.raises(ValueError, match="holds no tokens written before"):
        write_features(path, [(slice(0, 2), torch.zeros(2, 9, 6))], 2)
    assert (path / "zarr.json").is_file()
