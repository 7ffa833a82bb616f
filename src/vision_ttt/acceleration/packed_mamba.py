"""The block of Vim and Mamba-Reg on packed weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F

from vision_ttt.acceleration.supported_parts import (
    UnsupportedPart,
    require,
    require_linear,
    require_scans,
)
from vision_ttt.layers import BidirectionalMamba, MambaBlock
from vision_ttt.ops.packed import pack, packed_mamba_block
from vision_ttt.ops.packed.mamba_block_weights import (
    MambaBlockParameters,
    MambaBlockSizes,
    join_parameters,
    refusal,
)


class PackedMambaBlock(nn.Module):
    """:class:`vision_ttt.layers.MambaBlock` for evaluation on a CPU: [B, T, D] → [B, T, D].

    Args:
        block: the block whose weights are packed; it is not changed.
        dtype: float32 or bfloat16, of the packed weights.

    Raises:
        UnsupportedPart: a part is not of this library, was changed, has a hook, or has a size that
            the kernels do not support.
    """

    kind = MambaBlock

    def __init__(self, block: MambaBlock, dtype: torch.dtype) -> None:
        super().__init__()
        _require_supported_parts(block)
        mixer = block.mixer
        reason = refusal(mixer.in_proj.in_features, mixer.inner, mixer.state)
        if reason:
            raise UnsupportedPart(reason)
        self.sizes = MambaBlockSizes(
            inner=mixer.inner,
            taps=mixer.conv.kernel_size[0],
            rank=mixer.rank + mixer.rank % 2,
            is_bfloat16=int(dtype == torch.bfloat16),
        )
        eps = block.norm.eps
        self.eps = torch.finfo(torch.float32).eps if eps is None else eps  # as nn.RMSNorm has it
        self.register_buffer("weights", join_parameters(_parameters(block, dtype), self.sizes))

    def forward(
        self, y: Tensor, grid: tuple[int, int] | None = None, extra: Sequence[int] = ()
    ) -> Tensor:
        """Run the block; a sequence needs neither its grid nor the positions of extra tokens."""
        return packed_mamba_block(y, self.weights, self.sizes, eps=self.eps)


def _require_supported_parts(block: MambaBlock) -> None:
    require(block, "it", MambaBlock)
    require(block.mixer, "mixer", BidirectionalMamba)
    require(block.norm, "norm", nn.RMSNorm)
    require(block.drop_path, "drop_path", DropPath, nn.Identity)
    require_scans(block.mixer.conv, "mixer.conv", block.mixer.inner)
    for path in ("mixer.in_proj", "mixer.out_proj"):
        require_linear(block.get_submodule(path), path, bias=False)
    if block.norm.weight is None:
        raise UnsupportedPart("norm has no weight")


def _parameters(block: MambaBlock, dtype: torch.dtype) -> MambaBlockParameters:
    """The op's parameters: weights of products packed, others copied."""
    mixer = block.mixer
    rank, states, directions = mixer.rank, mixer.state, (2, mixer.inner)

    def copy(x: Tensor) -> Tensor:
        return x.detach().float().contiguous().clone()

    # The op takes an even rank: for an odd one, a number that is 0.
    low, vectors = mixer.x_proj.split([rank, 2 * states], dim=1)
    low, steps = F.pad(low, (0, 0, 0, rank % 2)), F.pad(mixer.dt_proj, (0, rank % 2))
    decay = -torch.exp(mixer.A_log.detach().float()) / math.log(2)
    return MambaBlockParameters(
        norm=copy(block.norm.weight),
        in_proj=pack(mixer.in_proj.weight, dtype, of_block=True),
        conv=copy(mixer.conv.weight.view(*directions, -1).transpose(1, 2)),
        conv_bias=copy(mixer.conv.bias.view(directions)),
        vectors_forth=pack(vectors[0], dtype, of_block=True),
        vectors_back=pack(vectors[1], dtype, of_block=True),
        low_forth=pack(low[0], dtype, of_block=True),
        low_back=pack(low[1], dtype, of_block=True),
        steps_forth=pack(steps[0], dtype, of_block=True),
        steps_back=pack(steps[1], dtype, of_block=True),
        steps_bias=copy(mixer.dt_bias.view(directions)),
        decay=copy(decay.view(*directions, states).transpose(1, 2)),
        skip=copy(mixer.D.view(directions)),
        out_proj=pack(mixer.out_proj.weight, dtype, of_block=True),
    )
