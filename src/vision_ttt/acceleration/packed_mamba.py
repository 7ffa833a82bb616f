"""The block of Vim and Mamba-Reg on packed weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F

from vision_ttt.acceleration.packed_block import PackedBlock
from vision_ttt.acceleration.supported_parts import (
    UnsupportedPart,
    require,
    require_linear,
    require_scans,
)
from vision_ttt.layers import BidirectionalMamba, MambaBlock
from vision_ttt.ops.packed import packed_mamba_block
from vision_ttt.ops.packed.mamba_block import BLOCK, STATES


class PackedMambaBlock(PackedBlock):
    """:class:`vision_ttt.layers.MambaBlock` for evaluation on a CPU: [B, T, D] → [B, T, D]."""

    kind = MambaBlock

    def __init__(self, block: MambaBlock, dtype: torch.dtype) -> None:
        require_supported_parts(block)
        dim = block.mixer.in_proj.in_features
        super().__init__(BLOCK, dtype, dim, sizes_of(block), parameters_of(block))
        self.eps = eps_of(block)

    def forward(
        self, y: Tensor, grid: tuple[int, int] | None = None, extra: Sequence[int] = ()
    ) -> Tensor:
        """Run the block on the sequence of all tokens; ``grid`` and ``extra`` are ignored."""
        return packed_mamba_block(y, self.weights, self.sizes, eps=self.eps)


def require_supported_parts(block: MambaBlock) -> None:
    """Require that a block computes what its class does: own parts, unchanged, without hooks.

    Raises:
        UnsupportedPart: a part is another, or was changed.
    """
    require(block, "it", MambaBlock)
    mixer = block.mixer
    require(mixer, "mixer", BidirectionalMamba)
    require(block.norm, "norm", nn.RMSNorm)
    require(block.drop_path, "drop_path", DropPath, nn.Identity)
    require_scans(mixer.conv, "mixer.conv", mixer.inner)
    for path in ("mixer.in_proj", "mixer.out_proj"):
        require_linear(block.get_submodule(path), path, bias=False)
    if block.norm.weight is None:
        raise UnsupportedPart("norm has no weight")
    if mixer.state != STATES:
        raise UnsupportedPart(f"state {mixer.state} is not {STATES}")


def sizes_of(block: MambaBlock) -> dict[str, int]:
    """The block's sizes by the names that the op gives them, but for ``is_bfloat16``."""
    mixer = block.mixer
    return {
        "inner": mixer.inner,
        "taps": mixer.conv.kernel_size[0],
        "rank": mixer.rank + mixer.rank % 2,
    }


def eps_of(block: MambaBlock) -> float:
    """The op's ``eps``."""
    eps = block.norm.eps
    return torch.finfo(torch.float32).eps if eps is None else eps  # as nn.RMSNorm has it


def parameters_of(block: MambaBlock) -> dict[str, Tensor]:
    """The block's parameters by the names that the op gives them."""
    mixer = block.mixer
    # The op requires an even rank. An odd rank is padded with zeros.
    low, vectors = mixer.x_proj.split([mixer.rank, 2 * STATES], dim=1)
    odd = mixer.rank % 2
    decay = -torch.exp(mixer.A_log.detach().float()) / math.log(2)
    of_directions = {
        "conv": mixer.conv.weight.view(2, mixer.inner, -1).transpose(1, 2),
        "conv_bias": mixer.conv.bias.view(2, -1),
        "vectors": vectors,
        "low": F.pad(low, (0, 0, 0, odd)),
        "steps": F.pad(mixer.dt_proj, (0, odd)),
        "steps.bias": mixer.dt_bias.view(2, -1),
        "decay": decay.view(2, mixer.inner, STATES).transpose(1, 2),
        "skip": mixer.D.view(2, -1),
    }
    return {
        "norm": block.norm.weight,
        "in_proj": mixer.in_proj.weight,
        **{f"forth.{name}": x[0] for name, x in of_directions.items()},
        **{f"back.{name}": x[1] for name, x in of_directions.items()},
        "out_proj": mixer.out_proj.weight,
    }
