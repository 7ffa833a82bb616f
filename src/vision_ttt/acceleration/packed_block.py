"""The base class of blocks with packed weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vision_ttt.acceleration.supported_parts import UnsupportedPart
from vision_ttt.ops.packed.block import Block


class PackedBlock(nn.Module):
    """A block as one op, for evaluation on a CPU.

    Each kind of block has a subclass, whose ``kind`` is the class of the block. It maps the block's
    sizes and parameters to the names that the op gives them.

    Args:
        op: the declaration of the op.
        dtype: float32 or bfloat16, of the packed weights.
        dim: D, the channels of a token.
        sizes: those of the op, but for ``is_bfloat16``.
        parameters: by name; they are copied.

    Raises:
        UnsupportedPart: the kernels do not support the sizes.
        ValueError: a parameter has another shape than the sizes give it.
    """

    weights: Tensor

    def __init__(
        self,
        op: Block,
        dtype: torch.dtype,
        dim: int,
        sizes: Mapping[str, int],
        parameters: Mapping[str, Tensor | None],
    ) -> None:
        super().__init__()
        self.dim = dim
        self.sizes = op.sizes(**sizes, is_bfloat16=int(dtype == torch.bfloat16))
        reason = op.unsupported(dim, self.sizes)
        if reason:
            raise UnsupportedPart(reason)
        self.register_buffer("weights", op.join(parameters, dim, self.sizes))
