"""Runs that are killed go on where they were; what is not theirs, or damaged, is refused."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from tolerances import assert_close
from vision_ttt.engine.locks import alone_in
from vision_ttt.whole import ArrayPicture, Normalisation, TensorPicture, WholePictures, scratch
from vision_ttt.whole.embedding import Picture
from whole_models import collected, in_bands, make

PICTURE = torch.randn(3, 44, 36, generator=torch.Generator().manual_seed(1))


class Killed(Exception):
    """Raised where a process might be killed."""


def killed_after(count: int) -> Callable[[int, int], None]:
    """A report that ends a run after so many bands."""

    def report(done: int, total: int) -> None:
        if done >= count:
            raise Killed

    return report


def killed(whole: WholePictures, count: int, picture: Tensor | Picture = PICTURE) -> None:
    with pytest.raises(Killed):
        collected(whole, picture, report=killed_after(count))


@pytest.fixture(autouse=True)
def _small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    in_bands(monkeypatch, 40)


@pytest.mark.parametrize("name", ["vittt-middle", "vit3", "mambar", "linear-vit", "vrwkv"])
def test_a_killed_run_goes_on_at_its_band(name: str, tmp_path: Path) -> None:
    model, folder = make(name), tmp_path / "scratch"
    wanted = WholePictures(model)
    whole = WholePictures(model, scratch=folder)
    steps: list[tuple[int, int]] = []
    tokens = collected(wanted, PICTURE, report=lambda *done: steps.append(done))
    bands = 3
    of_block = {"linear-vit": 3, "vrwkv": 4}.get(name, 2)
    sweeps = 1 + 3 * of_block  # the embedding, those of three blocks
    assert len(steps) == steps[-1][0] == steps[-1][1] == bands * sweeps
    for count in (*range(1, len(steps), 2), len(steps)):
        killed(whole, count)
    rest: list[int] = []
    got = collected(whole, PICTURE, report=lambda done, total: rest.append(done))
    assert rest == []  # all had been done
    assert torch.equal(got, tokens)
    assert not folder.exists()
    if name != "vit3":
        killed(whole, 5)
        assert_close(whole.logits(PICTURE), wanted.logits(PICTURE), 0)


def test_a_band_is_done_again_where_the_kill_came_before_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("vittt")
    whole = WholePictures(model, scratch=tmp_path / "scratch")
    wanted = collected(WholePictures(model), PICTURE)
    for count in range(1, 21, 3):
        number = iter(range(1000))
        write = scratch.Scratch.write

        def fail(self: scratch.Scratch, write=write, number=number, count=count) -> None:
            if next(number) == min(count, 3):
                raise Killed
            write(self)

        with monkeypatch.context() as patch:
            patch.setattr(scratch.Scratch, "write", fail)
            with pytest.raises(Killed):
                collected(whole, PICTURE)
    assert torch.equal(collected(whole, PICTURE), wanted)


def test_another_runs_scratch_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    model = make("vittt")
    killed(WholePictures(model, scratch=folder), 8)
    with pytest.raises(ValueError, match="of another run: picture differ"):
        collected(WholePictures(model, scratch=folder), PICTURE + 1)
    with pytest.raises(ValueError, match="of another run: storage differ"):
        collected(WholePictures(model, scratch=folder, storage=torch.bfloat16), PICTURE)
    with torch.no_grad():
        model.norm.bias += 1
    with pytest.raises(ValueError, match="of another run: model differ"):
        collected(WholePictures(model, scratch=folder), PICTURE)


def test_pixels_normalised_in_another_way_are_of_another_run(tmp_path: Path) -> None:
    pixels = np.zeros((44, 36, 3), np.uint16)
    whole = WholePictures(make("vittt"), scratch=tmp_path / "scratch")
    one, again, other = (Normalisation([0.5] * 3, [0.2] * 3, x) for x in (4095, 4095, 10_000))
    killed(whole, 8, ArrayPicture(pixels, one))
    with pytest.raises(ValueError, match="of another run: normalisation differ"):
        collected(whole, ArrayPicture(pixels, other))
    assert collected(whole, ArrayPicture(pixels, again)).isfinite().all()


@pytest.mark.parametrize("count", [2, 8, 20])
@pytest.mark.parametrize("file", ["tokens", "side"])
def test_a_damaged_scratch_is_refused(file: str, count: int, tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    whole = WholePictures(make("vittt"), scratch=folder)
    killed(whole, count)
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(bytes(byte ^ 1 for byte in content))
    if (file, count) == ("side", 2):  # none of it is read again
        assert collected(whole, PICTURE).isfinite().all()
        return
    with pytest.raises(ValueError, match=f"{file} is damaged in rows"):
        collected(whole, PICTURE)
    (folder / file).write_bytes(content[:-4])
    with pytest.raises(ValueError, match=f"has {len(content) - 4} bytes, {len(content)} are"):
        collected(whole, PICTURE)
    (folder / file).unlink()
    with pytest.raises(ValueError, match="is missing"):
        collected(whole, PICTURE)


def test_a_damaged_or_missing_record_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    whole = WholePictures(make("vittt"), scratch=folder)
    killed(whole, 8)
    record = folder / scratch.RECORD
    content = record.read_bytes()
    record.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"record\.safetensors"):
        collected(whole, PICTURE)
    record.unlink()
    with pytest.raises(ValueError, match="nothing says which run they are of"):
        collected(whole, PICTURE)


def test_a_disk_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=3000)
    monkeypatch.setattr(scratch.shutil, "disk_usage", lambda folder: usage)
    whole = WholePictures(make("vittt"), scratch=tmp_path / "scratch")
    with pytest.raises(ValueError, match=r"needs .* KiB in the .*; its disk has 2.9 KiB of room"):
        collected(whole, PICTURE)


def test_one_process_at_a_time_uses_a_scratch_folder(tmp_path: Path) -> None:
    whole = WholePictures(make("vittt"), scratch=tmp_path)
    with (
        alone_in(tmp_path, wait=False),
        pytest.raises(BlockingIOError, match="another process") as caught,
    ):
        collected(whole, PICTURE)
    assert caught.value.errno in (errno.EAGAIN, errno.EACCES)


def test_a_run_that_ended_in_its_first_band_can_be_repeated(tmp_path: Path) -> None:
    class Unreadable(TensorPicture):
        def read(self, first: int, last: int) -> Tensor:
            raise KeyboardInterrupt

    model = make("vittt-middle")
    whole = WholePictures(model, scratch=tmp_path / "scratch")
    with pytest.raises(KeyboardInterrupt):
        collected(whole, Unreadable(PICTURE))
    assert torch.equal(collected(whole, PICTURE), collected(WholePictures(model), PICTURE))
