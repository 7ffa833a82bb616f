"""Arrays and memory maps as pictures, and how their pixels are normalised."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from vision_ttt.whole import ArrayPicture, Normalisation, TensorPicture

MEAN, STD = [0.4, 0.5], [0.2, 0.25]


@pytest.mark.parametrize(
    ("dtype", "largest"), [(np.uint8, 255), (np.uint16, 65535), (np.float32, 1), (np.float16, 1)]
)
def test_pixels_are_scaled_by_the_largest_of_their_dtype(dtype: type, largest: int) -> None:
    pixels = (np.random.default_rng(0).random((9, 7, 2)) * largest).astype(dtype)
    read = ArrayPicture(pixels, Normalisation(MEAN, STD)).read(2, 6)
    wanted = torch.from_numpy(pixels[2:6].astype(np.float32)).permute(2, 0, 1) / largest
    wanted = (wanted - torch.tensor(MEAN).view(-1, 1, 1)) / torch.tensor(STD).view(-1, 1, 1)
    torch.testing.assert_close(read, wanted, atol=1e-5, rtol=1e-5)


def test_a_memory_map_is_read_again_and_again(tmp_path: Path) -> None:
    pixels = np.arange(60, dtype=np.uint16).reshape(10, 6)
    np.save(tmp_path / "p.npy", pixels)
    mapped = np.load(tmp_path / "p.npy", mmap_mode="r")
    picture = ArrayPicture(mapped, Normalisation([0.0], [1.0], largest=1))
    for _ in range(2):
        assert picture.read(3, 5).tolist() == [pixels[3:5].tolist()]


def test_an_array_is_another_one_where_any_pixel_is(tmp_path: Path) -> None:
    """Of a map, whose rows are not all read, where its file was written."""
    path, normalisation = tmp_path / "p.npy", Normalisation([0.0], [1.0])
    pixels = np.zeros((1000, 6), np.float32)
    np.save(path, pixels)
    mapped = np.load(path, mmap_mode="r")

    def identities() -> list[str]:
        copied = mapped.copy()  # of the map's class, in memory
        arrays = (pixels, copied, mapped, np.asarray(mapped[:, 1:]))
        tensor = TensorPicture(torch.from_numpy(pixels[None]))
        return [tensor.identity, *(ArrayPicture(each, normalisation).identity for each in arrays)]

    before = identities()
    assert before == identities()
    assert before[0] == before[1] == before[2]
    pixels[7] = 1  # between two rows that are read of a map
    with path.open("r+b") as file:
        file.seek(-pixels.nbytes, os.SEEK_END)
        file.write(pixels.tobytes())
    os.utime(path, ns=(0, 0))  # a time of its own, whatever the clock's steps are
    assert all(one != other for one, other in zip(before, identities(), strict=True))


def test_other_arrays_are_refused() -> None:
    normalisation = Normalisation(MEAN, STD)
    with pytest.raises(TypeError, match="pixels are int64; accepted: uint8"):
        ArrayPicture(np.zeros((4, 4, 2), np.int64), normalisation)
    with pytest.raises(ValueError, match=r"must be \[H, W, C\], got \[0, 4, 2\]"):
        ArrayPicture(np.zeros((0, 4, 2), np.uint8), normalisation)
    with pytest.raises(ValueError, match="has 3 channels, and mean and std are given for 2"):
        ArrayPicture(np.zeros((4, 4, 3), np.uint8), normalisation)
    with pytest.raises(ValueError, match="mean and std must be given by channel"):
        Normalisation(MEAN, [1.0])
    with pytest.raises(ValueError, match="must be above 0"):
        Normalisation(MEAN, [1.0, 0.0])


@pytest.mark.parametrize("dtype", [">u2", ">f4"])
def test_bytes_may_lie_in_either_order(dtype: str) -> None:
    pixels = np.arange(2 * 3 * 3).reshape(2, 3, 3)
    normalise = Normalisation((0.5,) * 3, (0.5,) * 3)
    native = np.dtype(dtype).newbyteorder("=")
    assert torch.equal(normalise(pixels.astype(dtype)), normalise(pixels.astype(native)))
