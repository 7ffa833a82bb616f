"""Tensors in files: streamed, and checked without being read."""

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from vision_ttt.engine import CheckpointError, tensor_files
from vision_ttt.engine.tensor_files import (
    inspect_tensors,
    load_tensors,
    read_tensors,
    write_tensors,
)

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


def test_values_are_copied_into_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, TENSORS, "é")
    found = inspect_tensors(path)
    assert found.text == "é"
    assert found.shapes == {name: (value.dtype, value.shape) for name, value in TENSORS.items()}
    tensors = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    load_tensors(path, tensors)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


def test_a_digest_that_does_not_fit_is_found_by_reading_the_file_through(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, TENSORS, "é")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    inspect_tensors(path, hashing=False)
    with pytest.raises(CheckpointError, match="does not have its SHA-256"):
        inspect_tensors(path)
