"""Folders of `vision-ttt tokenize`: documents as a file of tokens, made once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vision_ttt.data import DatasetError
from vision_ttt.data.documents import Documents
from vision_ttt.engine.config import ConfigError
from vision_ttt.engine.described import check_number
from vision_ttt.engine.section import COUNT
from vision_ttt.file_kinds import read_regular
from vision_ttt.files import atomic_file, write_text
from vision_ttt.tasks.language.packing import Packed, TokenFile, encode, token_kind
from vision_ttt.tasks.language.tokenizers import Tokenizer

_TOKENS, _DESCRIPTION = "tokens.bin", "tokens.json"
_COUNTS = ("tokens", "documents", "bytes")


def is_token_folder(path: str) -> bool:
    """Whether a folder is one of `vision-ttt tokenize`."""
    return (Path(path) / _DESCRIPTION).is_file()


def write_token_folder(
    folder: Path,
    documents: Documents,
    tokenizer: Tokenizer,
    field: str,
    *,
    skip_bad: bool,
    between: Callable[[int, int], None] = lambda done, tokens: None,
) -> Packed:
    """Write documents as tokens, which are in no memory together, and return them.

    Args:
        folder: made where missing; it is a token folder when all is written.
        skip_bad: leave out what cannot be read.
        between: as of :func:`encode`.

    Raises:
        DocumentError: a document cannot be read, and is not to be skipped.
        DatasetError: there is no text.
        OSError: the disk is full, or the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    with atomic_file(folder / _TOKENS) as file:

        def write(tokens: np.ndarray) -> None:
            nonlocal count
            count += len(tokens)
            file.write(tokens.tobytes())

        number, size, damaged = encode(
            documents, tokenizer, field, write, between, skip_bad=skip_bad
        )
        if not size:
            raise DatasetError(f"{len(documents.names)} files of {documents.root} hold no text")
        # The former tokens stay whole until these replace them.
        (folder / _DESCRIPTION).unlink(missing_ok=True)
    kind = np.dtype(token_kind(tokenizer)).name
    described = {"kind": kind, "tokens": count, "documents": number, "bytes": size}
    own = {
        "vocab_size": tokenizer.vocab_size,
        "end": tokenizer.end,
        "tokenizer": _digest(tokenizer),
    }
    write_text(folder / _DESCRIPTION, json.dumps({**described, **own}, indent=2) + "\n")
    return dataclasses.replace(read_token_folder(folder, tokenizer), damaged=damaged)


def read_token_folder(folder: Path, tokenizer: Tokenizer) -> Packed:
    """Return the tokens of a folder, which stay on the disk.

    Raises:
        ConfigError: they are another tokenizer's.
        DatasetError: the folder is damaged.
    """
    try:
        told = json.loads(read_regular(folder / _DESCRIPTION, 2**20))
        for name in _COUNTS:
            check_number(name, told[name], COUNT, whole=True)
        if told["kind"] not in ("uint16", "int32"):
            raise ValueError(f"tokens of the kind {told['kind']!r}")
        tokens = TokenFile(folder / _TOKENS, told["kind"], told["tokens"])
        size, wanted = tokens.path.stat().st_size, tokens.count * tokens.kind.itemsize
        if size != wanted:
            raise ValueError(f"{_TOKENS} has {size:,} bytes instead of {wanted:,}")
        own = (told["vocab_size"], told["end"], told["tokenizer"])
    except (ValueError, TypeError, KeyError) as error:
        raise DatasetError(f"the tokens of {folder} are damaged: {error}") from error
    if own != (tokenizer.vocab_size, tokenizer.end, _digest(tokenizer)):
        raise ConfigError(
            f"the tokens of {folder} are of another tokenizer, with {told['vocab_size']} tokens; "
            f"that of the run has {tokenizer.vocab_size}"
        )
    return Packed(tokens, told["documents"], told["bytes"], ())


def _digest(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(json.dumps(tokenizer.files(), sort_keys=True).encode()).hexdigest()
