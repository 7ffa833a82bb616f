"""Documents end to end, cut into sequences of equal length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vision_ttt.data.documents import DocumentError, Documents
from vision_ttt.errors import DamagedItem
from vision_ttt.tasks.language.tokenizers import Tokenizer

IGNORED = -100
"""Target where there is none, as PyTorch's cross-entropy has it."""


class TokenFile:
    """Tokens in a file; a slice is mapped into memory, for as long as it is in use."""

    def __init__(self, path: Path, kind: str, count: int) -> None:
        self.path, self.kind, self.count = path, np.dtype(kind), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self.count)
        shape = (max(stop - start, 0),)
        # One map of the whole file would count as this process's memory, page by page.
        return np.memmap(self.path, self.kind, "r", start * self.kind.itemsize, shape)


@dataclass(frozen=True)
class Packed:
    """Documents as one row of tokens."""

    tokens: np.ndarray | TokenFile
    """An end, then each document and an end [N + 1]; all but the first are predicted."""
    documents: int
    """Number of documents."""
    bytes: int
    """Size of their text in UTF-8."""
    damaged: tuple[DamagedItem, ...]
    """Errors of the documents that could not be read."""


def pack(documents: Documents, tokenizer: Tokenizer, field: str = "text") -> Packed:
    """Read documents and return them as tokens, in the order of their names."""
    parts: list[np.ndarray] = []
    counts = encode(documents, tokenizer, field, parts.append)
    return Packed(np.concatenate(parts), *counts)


def encode(
    documents: Documents,
    tokenizer: Tokenizer,
    field: str,
    write: Callable[[np.ndarray], object],
    between: Callable[[int, int], None] = lambda done, tokens: None,
    *,
    skip_bad: bool = True,
) -> tuple[int, int, tuple[DamagedItem, ...]]:
    """Write documents as tokens piece by piece, as :class:`Packed` has them.

    Args:
        write: called with the tokens that follow.
        between: called after each file with the numbers of files and of tokens so far.
        skip_bad: leave out what cannot be read.

    Returns:
        The number of documents, that of their bytes, and the errors of those that cannot be read.
        What was read of one before its error is written, and ends there.

    Raises:
        DocumentError: a document cannot be read, and is not to be skipped.
    """
    kind = token_kind(tokenizer)
    end = np.array([tokenizer.end], dtype=kind)
    write(end)
    count, size, total, damaged = 0, 0, 1, []
    for done, name in enumerate(documents.names, start=1):
        is_open = False
        try:
            for text, ends in documents.pieces(name, field):
                tokens = tokenizer.encode(text).astype(kind)
                write(tokens)
                if ends:
                    write(end)
                is_open = not ends
                count, size = count + ends, size + len(text.encode("utf-8"))
                total += len(tokens) + ends
        except DocumentError as error:
            if not skip_bad:
                raise
            damaged.append(error)
            if is_open:
                write(end)
        between(done, total)
    return count, size, tuple(damaged)


def token_kind(tokenizer: Tokenizer) -> type[np.integer]:
    """The kind of numbers that tokens are kept as."""
    return np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32


class Sequences(Dataset):
    """Rows of tokens cut into sequences; each token is predicted once.

    Items are (inputs [T] int64, targets [T] int64, index): the targets are the tokens one further,
    and the last sequence is filled up with targets of IGNORED. After them comes the error of every
    document that could not be read, so that it is named and counted as damaged items are.
    """

    def __init__(self, packed: Packed, context: int, end: int) -> None:
        """Cut `packed` into sequences of `context` tokens, filled up with `end`."""
        self.packed = packed
        self.context = context
        self.end = end
        self.sequences = -(-self.predicted // context)
        self.epoch = 0

    @property
    def predicted(self) -> int:
        """Number of tokens that are predicted."""
        return len(self.packed.tokens) - 1

    def __len__(self) -> int:
        return self.sequences + len(self.packed.damaged)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int] | DamagedItem:
        if index >= self.sequences:
            return self.packed.damaged[index - self.sequences]
        start = index * self.context
        window = self.packed.tokens[start : start + self.context + 1].astype(np.int64)
        inputs = torch.full((self.context,), self.end)
        targets = torch.full((self.context,), IGNORED)
        inputs[: len(window) - 1] = torch.from_numpy(window[:-1])
        targets[: len(window) - 1] = torch.from_numpy(window[1:])
        return inputs, targets, index
