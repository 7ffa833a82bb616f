"""Gradient checkpointing of a model's blocks."""

from __future__ import annotations

from typing import Any

from timm.models import checkpoint
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing


def run_block(block: nn.Module, *inputs: Any, checkpointing: bool) -> Tensor:
    """``block(*inputs)``, with ``checkpointing`` keeping only the inputs for the backward pass.

    A trace by torch.fx holds the block's operations either way.
    """
    if checkpointing and not is_fx_symbolic_tracing():
        return checkpoint(block, *inputs)
    return block(*inputs)
