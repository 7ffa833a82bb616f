"""Documents end to end, cut into sequences of equal length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vision_ttt.data.documents import DocumentError, Documents
from vision_ttt.errors import DamagedItem
from vision_ttt.tasks.language.tokenizers import Tokenizer

IGNORED = -100
"""Target where there is none, as PyTorch's cross-entropy has it."""


@dataclass(frozen=True)
class Packed:
    """Documents as one row of tokens."""

    tokens: np.ndarray
    """An end, then each document and an end [N + 1]: all but the first are to be predicted."""
    documents: int
    """In it."""
    bytes: int
    """Of their text in UTF-8."""
    damaged: tuple[DamagedItem, ...]
    """Why others are not."""


def pack(documents: Documents, tokenizer: Tokenizer) -> Packed:
    """Read documents and return them as tokens, in the order of their names."""
    kind = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    end = np.array([tokenizer.end], dtype=kind)
    parts, damaged, size = [end], [], 0
    for name in documents.names:
        try:
            text = documents.read(name)
        except DocumentError as error:
            damaged.append(error)
            continue
        parts += tokenizer.encode(text).astype(kind), end
        size += len(text.encode("utf-8"))
    return Packed(np.concatenate(parts), len(parts) // 2, size, tuple(damaged))


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
