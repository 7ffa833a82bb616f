"""The cache of a TTT language model: where every sequence of a batch is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from vision_ttt.language.block import TTTBlockState
from vision_ttt.ops import states


class TTTCache:
    """The states of all blocks after a call, of the same size after any number of tokens.

    A model never changes a cache that it is given: it returns a new one, so that a sequence can go
    on from one cache in several ways.

    Args:
        blocks: the state of every block; none at the beginning.
        length: the tokens of the batch so far, with padding.

    Raises:
        TypeError: a block's state is not a :class:`TTTBlockState`.
        ValueError: there are no states, and yet tokens.
    """

    is_compileable = False  # these and is_linear are asked for by transformers' generate
    is_croppable = False

    def __init__(self, blocks: Sequence[TTTBlockState] = (), length: int = 0) -> None:
        if not blocks and length:
            raise ValueError(f"a cache without states has seen no tokens, got length {length}")
        for block in blocks:
            if not isinstance(block, TTTBlockState):
                kind = type(block).__name__
                raise TypeError(f"a cache has a TTTBlockState for each block, got {kind}")
        self.blocks = tuple(blocks)
        self.length = length

    @property
    def is_linear(self) -> list[bool]:
        """True for every block, under transformers' name: it keeps no keys and values to crop."""
        return [True] * len(self.blocks)

    @property
    def batch(self) -> int | None:
        """The number of sequences; None at the beginning, which is any batch's."""
        return len(self.blocks[0].ttt.learner[0]) if self.blocks else None

    def get_seq_length(self) -> int:
        """The tokens so far, under the name that transformers' caches have for it."""
        return self.length

    def reset(self) -> None:
        """Return to the beginning of the sequences."""
        self.blocks, self.length = (), 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the sequences by those of some indices [B], as a beam search does."""
        self.blocks = self.select(beam_idx).blocks

    def select(self, rows: Tensor | Sequence[int] | slice) -> TTTCache:
        """The cache of some of the sequences, in the order that is asked for."""
        return TTTCache([block.select(rows) for block in self.blocks], self.length)

    def detach(self) -> TTTCache:
        """The cache cut off from autograd: where truncated backpropagation ends."""
        return TTTCache([block.detach() for block in self.blocks], self.length)

    def to(self, *args: Any, **kwargs: Any) -> TTTCache:
        """The cache on another device or in another dtype, as ``Tensor.to``."""
        return TTTCache([block.to(*args, **kwargs) for block in self.blocks], self.length)

    def tensors(self) -> dict[str, Tensor]:
        """The blocks' states as named tensors, such as safetensors saves."""
        return {
            f"{index}.{name}": x
            for index, block in enumerate(self.blocks)
            for name, x in block.tensors().items()
        }

    @classmethod
    def from_tensors(cls, named: dict[str, Tensor], length: int) -> TTTCache:
        """The cache whose :meth:`tensors` and length are given.

        Raises:
            ValueError: tensors are missing, no state has their names, or there are none and the
                length is not 0.
        """
        blocks: dict[int, dict[str, Tensor]] = {}
        for name, x in named.items():
            index, _, rest = name.partition(".")
            if not index.isdecimal():
                raise ValueError(f"a tensor of a cache is named as 0.ttt.…, got {name}")
            blocks.setdefault(int(index), {})[rest] = x
        if sorted(blocks) != list(range(len(blocks))):
            raise ValueError(f"blocks are missing: there are {sorted(blocks)}")
        ordered = (blocks[index] for index in range(len(blocks)))
        return cls([states.from_tensors(TTTBlockState, block) for block in ordered], length)


def check_cache(cache: object) -> None:
    """Raise TypeError unless it is a :class:`TTTCache`."""
    if not isinstance(cache, TTTCache):
        raise TypeError(
            f"cache must be a TTTCache, which holds states, got {type(cache).__name__}: there are "
            "no keys and values"
        )
