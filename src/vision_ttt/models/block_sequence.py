"""Blocks of one resolution, called one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from timm.models import checkpoint
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from vision_ttt.models.naflex import NaFlexBatch


def run_block(block: nn.Module, *inputs: Any, checkpointing: bool) -> Tensor:
    """``block(*inputs)``, with ``checkpointing`` keeping only the inputs for the backward pass.

    A trace by torch.fx holds the block's operations either way.
    """
    if checkpointing and not is_fx_symbolic_tracing():
        return checkpoint(block, *inputs)
    return block(*inputs)


class BlockSequence(nn.ModuleList):
    """Blocks (x [B, N, D], …) → [B, N, D] that are called one after the other.

    A list of modules that is called as a whole, so that all of it may be replaced by one op.

    Attributes:
        own_context: the blocks' other arguments in a call that gives none, as libraries written for
            timm's ViT call them; None, as at first, where such a call is not supported.
    """

    def __init__(self, blocks: Iterable[nn.Module] | None = None) -> None:
        super().__init__(blocks)
        self.own_context: tuple[Any, ...] | None = getattr(blocks, "own_context", None)

    def context_of(self, context: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the given context, or the blocks' own where the call gives none.

        Raises:
            ValueError: they have none.
        """
        if context or self.own_context is not None:
            return context or self.own_context
        raise ValueError(
            "these blocks require the context that the model's embed() returns; a call without it"
            " is supported only for models without rotary positions whose class tokens, if any,"
            " come first (global_pool 'avg' or 'head')"
        )

    def forward(
        self,
        x: Tensor,
        *context: Any,
        start: int = 0,
        stop: int | None = None,
        checkpointing: bool = False,
    ) -> Tensor:
        """Tokens [B, N, D] after the blocks from ``start`` to before ``stop``.

        Args:
            x: tokens [B, N, D].
            context: the blocks' other arguments; or a batch of images of any shapes, with x
                [1, S, D].
            start, stop: as in a slice.
            checkpointing: keep only each block's input for the backward pass.

        Raises:
            ValueError: no context is given, and there is none of its own.
        """
        context = self.context_of(context)
        if isinstance(context[0], NaFlexBatch):
            run = partial(self.forward, start=start, stop=stop, checkpointing=checkpointing)
            return context[0].each(run, x)
        for block in list(self)[start:stop]:  # a slice of itself would be a new module
            x = run_block(block, x, *context, checkpointing=checkpointing)
        return x
