"""Tensors and a JSON text in one safetensors file, which carries its own SHA-256.

That is the digest of the whole file with the digest's own 64 characters set to zeros, so that no
byte can change unnoticed, and a file and its digest always come from the same write. Neither
writing nor checking a file needs memory for more than one of its tensors.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vision_ttt.engine.sharded_tensors import fill, whole
from vision_ttt.errors import UserError
from vision_ttt.file_kinds import UnreadableFile, check_regular
from vision_ttt.files import atomic_file

HUB_CONFIG, HUB_WEIGHTS = "config.json", "model.safetensors"
"""The files of a model's folder on the Hugging Face hub."""
_TEXT = "vision_ttt"
_DIGEST = "sha256"
_ZEROS = "0" * 64
"""What stands in the digest's place while the file is hashed."""
_BLOCK = 1 << 20  # bytes read at a time
_DTYPE_NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8"},
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
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
    path: Path,
    tensors: Mapping[str, Tensor],
    text: str,
    *,
    writes: bool = True,
    synced: bool = True,
) -> None:
    """Write tensors and `text` atomically, with their digest.

    Args:
        tensors: if some are sharded, all processes that share them have to call this; they gather
            one tensor at a time.
        writes: whether this process writes the file, or only takes part in gathering.
        synced: as of :func:`vision_ttt.files.atomic_file`.

    Raises:
        OSError: the disk is full or the folder cannot be written; the former file is kept.
    """
    # Larger elements first, so that all are aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    values = (whole(tensors[name]) for name in names)
    try:
        if writes:
            start = _start(
                {name: (tensors[name].dtype, tensors[name].shape) for name in names}, text
            )
            hashed = hashlib.sha256(start)
            with atomic_file(path, synced=synced) as file:
                file.write(start)
                for value in values:
                    # The bytes of a tensor on the CPU that is contiguous: no copy.
                    value = value.cpu().contiguous().reshape(-1)
                    content = value.view(torch.uint8).numpy().data
                    hashed.update(content)
                    file.write(content)
                file.seek(0)
                file.write(start.replace(_entry(_ZEROS), _entry(hashed.hexdigest()), 1))
    finally:
        # An error on this process must not leave the others waiting for it.
        for _ in values:
            pass


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], str | None]:
    """Return a safetensors file's tensors and our JSON text, None where it has none.

    A digest is checked where there is one: files of other programs have none.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is truncated, damaged, a pickle (which is not opened) or cannot be read.
    """
    path = Path(path)
    with _naming(path), path.open("rb") as file:
        length = _start_length(path, file.read(9))
        file.seek(0)
        content = file.read()
        tensors = dict(sorted(safetensors.torch.load(content).items()))
        metadata = _metadata(content[:length])
        _check_digest(path, metadata, content[:length], [memoryview(content)[length:]])
    return tensors, metadata.get(_TEXT)


def inspect_tensors(path: Path, *, hashing: bool = True) -> Inspected:
    """Check a safetensors file as `read_tensors` does, and return what is in it but the values.

    Args:
        hashing: whether to read the file through, and check the digest.

    Raises:
        FileNotFoundError, CheckpointError: as `read_tensors`.
    """
    with _naming(path), path.open("rb") as file:
        length = _start_length(path, file.read(9))
        with safe_open(path, framework="pt") as opened:
            views = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            shapes = {
                name: (_DTYPES[view.get_dtype()], torch.Size(view.get_shape()))
                for name, view in views.items()
            }
        file.seek(0)
        start = file.read(length)
        metadata = _metadata(start)
        if hashing:
            _check_digest(path, metadata, start, iter(lambda: file.read(_BLOCK), b""))
    return Inspected(metadata.get(_TEXT), metadata.get(_DIGEST), shapes)


def load_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copy a file's values, one after the other, into tensors of its names and shapes.

    Of a tensor that several processes share, each takes its own part.

    Raises:
        FileNotFoundError, CheckpointError: the file cannot be read.
    """
    with _naming(path), safe_open(path, framework="pt") as file:
        for name, tensor in tensors.items():
            fill(tensor, file.get_tensor(name))


def _start(shapes: Shapes, text: str) -> bytes:
    """The beginning of a file up to the tensors: the header's length, and the header."""
    header: dict[str, Any] = {"__metadata__": {_DIGEST: _ZEROS, _TEXT: text}}
    end = 0
    for name, (dtype, shape) in shapes.items():
        if dtype not in _DTYPE_NAMES:
            accepted = ", ".join(map(str, _DTYPE_NAMES))
            raise TypeError(f"{name} has dtype {dtype}; accepted are {accepted}")
        begin, end = end, end + shape.numel() * dtype.itemsize
        place = {"shape": list(shape), "data_offsets": [begin, end]}
        header[name] = {"dtype": _DTYPE_NAMES[dtype], **place}
    content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-len(content) % 8)  # the tensors are aligned within the file
    return len(content).to_bytes(8, "little") + content


def _entry(digest: str) -> bytes:
    """Return the digest's entry as it stands in the header.

    The same characters within a JSON string have their quotes escaped, so the entry is unique.
    """
    return f'"{_DIGEST}":"{digest}"'.encode()


def _metadata(start: bytes) -> dict[str, str]:
    return json.loads(start[8:]).get("__metadata__") or {}


def _check_digest(
    path: Path, metadata: Mapping[str, str], start: bytes, rest: Iterable[Any]
) -> None:
    """Raise CheckpointError unless the content, `start` and `rest`, has its digest, if any."""
    digest = metadata.get(_DIGEST)
    if digest is None:
        return
    hashed = hashlib.sha256(start.replace(_entry(digest), _entry(_ZEROS), 1))
    for block in rest:
        hashed.update(block)
    if hashed.hexdigest() != digest:
        raise CheckpointError(f"{path} is damaged: its content does not have its SHA-256")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn what goes wrong in reading a safetensors file into a CheckpointError that names it."""
    if not os.path.lexists(path):
        raise FileNotFoundError(2, "No such checkpoint file", str(path))
    try:
        check_regular(path)
        yield
    except CheckpointError:
        raise
    except UnreadableFile as error:
        raise CheckpointError(str(error)) from error
    except (OSError, MemoryError) as error:
        larger = isinstance(error, MemoryError)
        reason = "it is larger than the memory" if larger else error.strerror or error
        raise CheckpointError(f"{path} cannot be read: {reason}") from error
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is truncated, corrupt or no safetensors file: {error}"
        ) from error


def _start_length(path: Path, first: bytes) -> int:
    """Return how many bytes lie before the tensors, by the first nine of the file."""
    # torch.save writes a zip; 0x80 and a protocol number begin every modern pickle. A safetensors
    # file may begin with the same bytes, because its first eight are the length of its header.
    is_pickle = first.startswith(b"PK") or (first[:1] == b"\x80" and first[1:2] in b"\2\3\4\5")
    if is_pickle and first[8:] != b"{":
        raise CheckpointError(
            f"{path} is a pickle, which could run code, and was not opened; a .safetensors file is"
            " accepted"
        )
    length = 8 + int.from_bytes(first[:8], "little")
    if length == 8 or length > path.stat().st_size:
        raise CheckpointError(f"{path} is truncated, corrupt or no safetensors file")
    return length
