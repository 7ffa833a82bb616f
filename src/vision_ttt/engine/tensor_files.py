"""Tensors and a JSON text in one safetensors file, which carries its own SHA-256.

Neither writing nor checking a file needs memory for more than one of its tensors.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vision_ttt.engine.digests import KEY as _DIGEST
from vision_ttt.engine.digests import ZEROS, with_digest, without_digest
from vision_ttt.engine.sharded_tensors import whole
from vision_ttt.errors import UserError
from vision_ttt.file_kinds import UnreadableFile, check_regular
from vision_ttt.files import atomic_file

_TEXT = "vision_ttt"
_BLOCK = 1 << 20  # bytes read at a time
DTYPE_NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8"},
    torch.bool: "BOOL",
}
"""The dtypes that can be written, with safetensors' names for them."""
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""The same by name."""
Shapes = Mapping[str, tuple[torch.dtype, torch.Size]]
"""Name of a tensor → its dtype and shape."""


class CheckpointError(UserError, ValueError):
    """A checkpoint that cannot be used; names the file and what is wrong with it."""


@dataclass(frozen=True)
class Inspected:
    """What a file says about itself."""

    text: str | None
    """Our JSON text; None where there is none."""
    digest: str | None
    """The SHA-256 in the file; files of other programs have none."""
    shapes: Shapes


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], text: str, *, writes: bool = True
) -> None:
    """Write tensors and `text` atomically, with their digest.

    Args:
        tensors: if some are sharded, all processes that share them have to call this; they gather
            one tensor at a time.
        writes: whether this process writes the file, or only takes part in gathering.

    Raises:
        OSError: the disk is full or the folder cannot be written; the former file is kept.
    """
    shapes = in_file_order({name: (value.dtype, value.shape) for name, value in tensors.items()})
    values = (whole(tensors[name]) for name in shapes)
    try:
        if writes:
            with atomic_file(path) as file:
                stream_tensors(file, shapes, values, text)
    finally:
        # An error on this process must not leave the others waiting for it.
        for _ in values:
            pass


def in_file_order(shapes: Shapes) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return `shapes` in the order of a file: larger elements first, so that all are aligned."""
    return dict(sorted(shapes.items(), key=lambda item: (-item[1][0].itemsize, item[0])))


def stream_tensors(file: BinaryIO, shapes: Shapes, values: Iterable[Tensor], text: str) -> str:
    """Write tensors one by one, with their digest; return the digest.

    Args:
        file: empty, open for binary writing.
        shapes: in the order of `in_file_order`.
        values: the tensors in the same order; each is fetched when the one before is written.

    Raises:
        OSError: the disk is full.
        TypeError: a dtype that safetensors does not know.
    """
    start = _start(shapes, text)
    file.write(start)
    hashed = hashlib.sha256(start)
    for value in values:
        # On the bytes of the tensor itself where it is on the CPU and contiguous: no copy.
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        hashed.update(content)
        file.write(content)
    digest = hashed.hexdigest()
    file.seek(0)
    file.write(with_digest(start, digest))
    return digest


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], str | None]:
    """Return a safetensors file's tensors and our JSON text, None where it has none.

    A digest is checked where there is one: files of other programs have none.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is truncated, damaged, a pickle (which is not opened) or cannot be read.
    """
    path = Path(path)
    _check_is_file(path)
    try:
        with path.open("rb") as file:
            first = file.read(9)
            _refuse_pickles(first, path)
            length = 8 + int.from_bytes(first[:8], "little")
            if not first[:8].strip(b"\0") or length > path.stat().st_size:
                raise CheckpointError(f"{path} is truncated, corrupt or no safetensors file")
            file.seek(0)
            content = file.read()
    except (OSError, MemoryError) as error:
        raise _unreadable(path, error) from error
    try:
        tensors = dict(sorted(safetensors.torch.load(content).items()))
        metadata = _metadata(content[:length])
    except (SafetensorError, ValueError, KeyError) as error:
        raise _not_safetensors(path, error) from error
    rest = memoryview(content)[length:]
    _check_digest(path, metadata.get(_DIGEST), content[:length], [rest])
    return tensors, metadata.get(_TEXT)


def inspect_tensors(path: Path, *, hashing: bool = True) -> Inspected:
    """Check a safetensors file as `read_tensors` does, and return what is in it but the values.

    Args:
        hashing: whether to read the file through, and check the digest.

    Raises:
        FileNotFoundError, CheckpointError: as `read_tensors`.
    """
    _check_is_file(path)
    try:
        with path.open("rb") as file:
            first = file.read(9)
            _refuse_pickles(first, path)
            length = 8 + int.from_bytes(first[:8], "little")
            if length > path.stat().st_size:
                raise CheckpointError(f"{path} is truncated, corrupt or no safetensors file")
            with safe_open(path, framework="pt") as opened:
                views = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                shapes = {
                    name: (DTYPES[view.get_dtype()], torch.Size(view.get_shape()))
                    for name, view in views.items()
                }
            file.seek(0)
            start = file.read(length)
            metadata = _metadata(start)
            if hashing:
                blocks = iter(lambda: file.read(_BLOCK), b"")
                _check_digest(path, metadata.get(_DIGEST), start, blocks)
    except (OSError, MemoryError) as error:
        raise _unreadable(path, error) from error
    except (SafetensorError, ValueError, KeyError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _not_safetensors(path, error) from error
    return Inspected(metadata.get(_TEXT), metadata.get(_DIGEST), shapes)


def _start(shapes: Shapes, text: str) -> bytes:
    """The beginning of a file up to the tensors: the header's length, and the header."""
    header: dict[str, Any] = {"__metadata__": {_DIGEST: ZEROS, _TEXT: text}}
    end = 0
    for name, (dtype, shape) in shapes.items():
        if dtype not in DTYPE_NAMES:
            accepted = ", ".join(map(str, DTYPE_NAMES))
            raise TypeError(f"{name} has dtype {dtype}; accepted are {accepted}")
        begin, end = end, end + shape.numel() * dtype.itemsize
        place = {"shape": list(shape), "data_offsets": [begin, end]}
        header[name] = {"dtype": DTYPE_NAMES[dtype], **place}
    content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-len(content) % 8)  # the tensors are aligned within the file
    return len(content).to_bytes(8, "little") + content


def _metadata(start: bytes) -> dict[str, str]:
    return json.loads(start[8:]).get("__metadata__", {})


def _check_digest(path: Path, digest: str | None, start: bytes, rest: Iterable[Any]) -> None:
    """Raise CheckpointError unless the content, `start` and `rest`, has this digest, if any."""
    if digest is None:
        return
    hashed = hashlib.sha256(without_digest(start, digest))
    for block in rest:
        hashed.update(block)
    if hashed.hexdigest() != digest:
        raise CheckpointError(f"{path} is damaged: its content does not have its SHA-256")


def _check_is_file(path: Path) -> None:
    if not os.path.lexists(path):
        raise FileNotFoundError(2, "No such checkpoint file", str(path))
    try:
        check_regular(path)
    except UnreadableFile as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:  # of a link to nothing, or to itself
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError | MemoryError) -> CheckpointError:
    larger = isinstance(error, MemoryError)
    reason = "it is larger than the memory" if larger else error.strerror or error
    return CheckpointError(f"{path} cannot be read: {reason}")


def _not_safetensors(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} is truncated, corrupt or no safetensors file: {error}")


def _refuse_pickles(start: bytes, path: Path) -> None:
    if start[8:] == b"{":  # a safetensors header, whose length before it may look like anything
        return
    # A zip is torch.save's container; 0x80 and a protocol number begin every modern pickle.
    if start.startswith(b"PK") or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"):
        raise CheckpointError(
            f"{path} is a pickle, which could run code, and was not opened; a .safetensors file is"
            " accepted"
        )
