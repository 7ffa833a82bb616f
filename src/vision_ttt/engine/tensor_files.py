"""Tensors and a JSON text in one safetensors file, which carries its own SHA-256.

The digest is that of the whole file with the digest's own 64 characters set to zeros, so that no
byte of it can change unnoticed, and so that a file and its digest can never belong to two writes.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from vision_ttt.engine.files import write_bytes
from vision_ttt.errors import UserError

_TEXT = "vision_ttt"
_DIGEST = "sha256"
_ZEROS = "0" * 64


class CheckpointError(UserError, ValueError):
    """A checkpoint that cannot be used; names the file and what is wrong with it."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], text: str) -> None:
    """Write tensors and `text` atomically, with their digest.

    Raises:
        OSError: the disk is full or the folder cannot be written; the former file is kept.
    """
    plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    content = bytearray(safetensors.torch.save(plain, {_TEXT: text, _DIGEST: _ZEROS}))
    place = content.index(_entry(_ZEROS))
    digest = hashlib.sha256(content).hexdigest()
    content[place : place + len(_entry(digest))] = _entry(digest)
    write_bytes(path, content)


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], str | None]:
    """Return a safetensors file's tensors and our JSON text, None where it has none.

    A digest is checked where there is one: files of other programs have none.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is truncated, damaged, a pickle (which is not opened) or cannot be read.
    """
    path = Path(path)
    if not os.path.lexists(path):
        raise FileNotFoundError(2, "No such checkpoint file", str(path))
    if not path.is_file():  # reading a FIFO would never end
        raise CheckpointError(f"{path} is no regular file")
    try:
        content = path.read_bytes()
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or "it is larger than the memory"
        raise CheckpointError(f"{path} cannot be read: {reason}") from error
    _refuse_pickles(content[:9], path)
    try:
        tensors = dict(sorted(safetensors.torch.load(content).items()))
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata = header.get("__metadata__", {})
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is truncated, corrupt or no safetensors file: {error}"
        ) from error
    digest = metadata.get(_DIGEST)
    if digest is not None and not _has_digest(content, digest):
        raise CheckpointError(f"{path} is damaged: its content does not have its SHA-256")
    return tensors, metadata.get(_TEXT)


def _has_digest(content: bytes, digest: str) -> bool:
    place = content.find(_entry(digest))
    if place < 0 or len(digest) != len(_ZEROS):
        return False
    place += len(_entry("")) - 1
    hashed = hashlib.sha256(memoryview(content)[:place])
    hashed.update(_ZEROS.encode())
    hashed.update(memoryview(content)[place + len(_ZEROS) :])
    return hashed.hexdigest() == digest


def _entry(digest: str) -> bytes:
    """The digest's entry as it stands in the header; quotes within our text are escaped there."""
    return f'"{_DIGEST}":"{digest}"'.encode()


def _refuse_pickles(start: bytes, path: Path) -> None:
    if start[8:] == b"{":  # a safetensors header, whose length before it may look like anything
        return
    # A zip is torch.save's container; 0x80 and a protocol number begin every modern pickle.
    if start.startswith(b"PK") or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"):
        raise CheckpointError(
            f"{path} is a pickle, which could run code, and was not opened; a .safetensors file is"
            " accepted"
        )
