"""Tensors in files and folders: streamed, checked without being read, damaged anywhere."""

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from vision_ttt.engine import CheckpointError, tensor_files
from vision_ttt.engine.sharded_files import is_sharded_folder, write_sharded
from vision_ttt.engine.stored_tensors import load_stored, open_stored
from vision_ttt.engine.tensor_files import inspect_tensors, read_tensors, write_tensors

TENSORS = {
    "matrix": torch.arange(6.0).view(2, 3).t(),  # not contiguous
    "scalar": torch.tensor(3.5),
    "none": torch.zeros(0, 3),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "count": torch.tensor([2**40]),
    "flags": torch.tensor([True, False, True]),
}


def test_a_file_is_what_the_library_writes_but_for_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, TENSORS, "é")
    plain = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    metadata = {"sha256": inspect_tensors(path).digest, "vision_ttt": "é"}
    headers = []
    for content in (path.read_bytes(), safetensors.torch.save(plain, metadata)):
        length = 8 + int.from_bytes(content[:8], "little")
        headers.append((length, json.loads(content[8:length]), content[length:]))
    assert headers[0] == headers[1]
    tensors, text = read_tensors(path)
    assert text == "é"
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name


def test_a_dtype_that_cannot_be_written(tmp_path: Path) -> None:
    tensors = {"wide": torch.zeros(1, dtype=torch.complex128)}
    with pytest.raises(TypeError, match=r"wide has dtype torch\.complex128; accepted are"):
        write_tensors(tmp_path / "a.safetensors", tensors, "")
    assert not os.listdir(tmp_path)


def test_after_an_error_the_other_tensors_are_still_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that share them wait for this one."""
    gathered = []

    def gather(tensor: Tensor) -> Tensor:
        gathered.append(tensor)
        return tensor

    monkeypatch.setattr(tensor_files, "whole", gather)
    with pytest.raises(OSError, match="the folder is gone"):
        write_tensors(tmp_path / "none" / "a.safetensors", TENSORS, "")
    assert len(gathered) == len(TENSORS)
    write_tensors(tmp_path / "a.safetensors", TENSORS, "", writes=False)
    assert len(gathered) == 2 * len(TENSORS)
    assert not os.listdir(tmp_path)


def _folder(path: Path) -> Path:
    with pytest.warns(UserWarning, match="single process"):  # of torch.distributed.checkpoint
        write_sharded(path, TENSORS, "é")
    return path


def _empty() -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}


def test_a_folder_holds_the_tensors(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "update-1")
    assert sorted(os.listdir(tmp_path)) == ["update-1"]
    assert is_sharded_folder(folder)
    for path in (folder, tmp_path / "a.safetensors"):
        if path != folder:
            write_tensors(path, TENSORS, "é")
        stored = open_stored(path)
        assert stored.text == "é"
        assert stored.shapes == {n: (t.dtype, t.shape) for n, t in TENSORS.items()}
        tensors = _empty()
        load_stored(stored, tensors)
        assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())
    (folder / "other").touch()
    assert not is_sharded_folder(folder)


@pytest.mark.parametrize("name", ["file", "manifest.json", "part-00000.safetensors"])
def test_no_byte_changes_unnoticed(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if name == "file":
        write_tensors(path, {"a": torch.arange(5.0), "b": torch.tensor(1)}, '"sha256":"')
        damaged = path
    else:
        damaged = _folder(path) / name
    whole = damaged.read_bytes()
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] ^= 0x10
        damaged.write_bytes(content)
        with pytest.raises(CheckpointError, match=str(damaged)):
            open_stored(path)
    for size in (0, 7, len(whole) // 2, len(whole) - 1):
        damaged.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=str(damaged)):
            open_stored(path)
    damaged.write_bytes(whole)
    open_stored(path)


def test_processes_share_the_reading(tmp_path: Path) -> None:
    """Each checks its files only."""
    folder = _folder(tmp_path / "update-1")
    part = folder / "part-00000.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    open_stored(folder, share=(1, 2))
    with pytest.raises(CheckpointError, match="part-00000"):
        open_stored(folder, share=(0, 2))


def test_a_manifest_that_names_files_elsewhere(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "update-1")
    text = (folder / "manifest.json").read_text()
    manifest = json.loads(text.replace("part-00000", "../part-00000"))
    manifest["sha256"] = "0" * 64
    content = json.dumps(manifest, separators=(",", ":")).encode()
    digest = hashlib.sha256(content).hexdigest()
    (folder / "manifest.json").write_bytes(content.replace(b"0" * 64, digest.encode(), 1))
    with pytest.raises(CheckpointError, match="not all in the folder"):
        open_stored(folder)


@pytest.mark.parametrize("failing", ["fsync", "replace", "mkdir"])
def test_a_full_disk_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match=r"No space left.*former checkpoints are kept") as caught:
        _folder(tmp_path / "update-1")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "update-1")
    assert not os.listdir(tmp_path)
