"""The blocks of ViT³, H-ViT³ and DiT³ on packed weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F

from vision_ttt.acceleration.supported_parts import UnsupportedPart, require, require_linear
from vision_ttt.layers import (
    AdaptiveNorm,
    ConvMlp,
    DiT3Block,
    Mlp,
    ResidualConv2d,
    ViT3Block,
    ViT3TTT,
)
from vision_ttt.layers.dit3 import TanhMlp
from vision_ttt.layers.grid import check_grid
from vision_ttt.ops.packed import Vit3BlockParameters, pack, packed_linear, packed_vit3_block
from vision_ttt.ops.packed.vit3_block import check_parameters, refusal
from vision_ttt.ops.vit3_ttt.descent import LOSS_SCALE


class PackedVit3Block(nn.Module):
    """:class:`vision_ttt.layers.ViT3Block` for evaluation on a CPU.

    Args:
        block: the block whose weights are packed; it is not changed.
        dtype: float32 or bfloat16, of the packed weights.

    Raises:
        UnsupportedPart: a part is not of this library, was changed, has a hook, or has a size that
            the kernels do not support.
    """

    kind: type[nn.Module] = ViT3Block
    mlps: tuple[type[nn.Module], ...] = (Mlp, ConvMlp)
    norm: type[nn.Module] = nn.LayerNorm

    def __init__(self, block: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self._require_supported_parts(block)
        dim, self.heads = block.ttt.proj.out_features, block.ttt.num_heads
        self.hidden = block.mlp.fc1.out_features
        reason = refusal(dim, self.heads, self.hidden)
        if reason:
            raise UnsupportedPart(reason)
        self.tanh_gelu = isinstance(block.mlp, TanhMlp)
        self.eps = tuple(self._layer_norm(norm).eps for norm in (block.norm1, block.norm2))
        parameters = _parameters(block, dtype, self._layer_norm)
        check_parameters(
            parameters, heads=self.heads, hidden=self.hidden, modulated=self.norm is AdaptiveNorm
        )
        for name, x in parameters._asdict().items():
            self.register_buffer(name, x)

    def forward(self, y: Tensor, grid: tuple[int, int], rotations: Tensor | None = None) -> Tensor:
        """Run the block; ``rotations`` as in :meth:`vision_ttt.layers.ViT3TTT.forward`.

        Raises:
            ValueError: T is not h · w.
        """
        given = {} if rotations is None else {"rotations": rotations.float()}
        return self._run(y, grid, **given)

    def _run(self, y: Tensor, grid: tuple[int, int], **given: Tensor) -> Tensor:
        check_grid(y.shape[1], grid)
        p = Vit3BlockParameters(*(self._buffers[name] for name in Vit3BlockParameters._fields))
        return packed_vit3_block(
            y.float(),  # autocast gives maps in another dtype
            p._replace(**given),
            grid=tuple(grid),
            heads=self.heads,
            hidden=self.hidden,
            tanh_gelu=self.tanh_gelu,
            loss_scale=LOSS_SCALE,
            eps=self.eps,
        )

    @staticmethod
    def _layer_norm(norm: nn.Module) -> nn.LayerNorm:
        return norm

    def _require_supported_parts(self, block: nn.Module) -> None:
        require(block, "it", self.kind)
        require(block.cpe, "cpe", ResidualConv2d)
        require(block.ttt, "ttt", ViT3TTT)
        require(block.mlp, "mlp", *self.mlps)
        for path in ("norm1", "norm2"):
            require(block.get_submodule(path), path, self.norm)
            require(self._layer_norm(block.get_submodule(path)), path, nn.LayerNorm)
        for path in ("ttt.qkv", "ttt.proj", "mlp.fc1", "mlp.fc2"):
            require(block.get_submodule(path), path, nn.Linear)
        convolutions = [block.cpe]
        if isinstance(block.mlp, ConvMlp):
            require(block.mlp.conv, "mlp.conv", ResidualConv2d)
            convolutions.append(block.mlp.conv)
        if any(conv.kernel_size != (3, 3) for conv in convolutions):
            raise UnsupportedPart("a convolution is not 3 x 3")
        if hasattr(block, "drop_path"):
            require(block.drop_path, "drop_path", DropPath, nn.Identity)


class PackedDit3Block(PackedVit3Block):
    """:class:`vision_ttt.layers.DiT3Block` for evaluation on a CPU; arguments as its base's."""

    kind = DiT3Block
    mlps = (TanhMlp,)
    norm = AdaptiveNorm

    def __init__(self, block: DiT3Block, dtype: torch.dtype) -> None:
        super().__init__(block, dtype)
        require(block.modulation, "modulation", nn.Sequential)
        silu, projection = block.modulation
        require(silu, "modulation.0", nn.SiLU)
        require_linear(projection, "modulation.1", bias=True)
        self.register_buffer("modulation_weight", pack(projection.weight, dtype))
        # The op multiplies by 1 + scale: the 1 is added to the bias of the two scales.
        bias = projection.bias.detach().float().clone().view(6, -1)
        bias[[1, 4]] += 1
        self.register_buffer("modulation_bias", bias.flatten())

    def forward(self, x: Tensor, c: Tensor, grid: tuple[int, int]) -> Tensor:
        """Run the block on tokens x [B, T, D] under a condition c [B, D].

        Raises:
            ValueError: T is not h · w.
        """
        columns = self.modulation_bias.numel()
        steering = packed_linear(
            F.silu(c.float()), self.modulation_weight, self.modulation_bias, columns
        )
        return self._run(x, grid, modulation=steering.unflatten(-1, (6, -1)))

    @staticmethod
    def _layer_norm(norm: AdaptiveNorm) -> nn.LayerNorm:
        return norm.norm


def _parameters(
    block: nn.Module, dtype: torch.dtype, layer_norm: Callable[[nn.Module], nn.LayerNorm]
) -> Vit3BlockParameters:
    """The op's parameters, weights of products packed, others copied; the op checks shapes."""
    ttt, mlp = block.ttt, block.mlp
    nothing = ttt.w1.new_empty(0, dtype=torch.float32)

    def copy(x: Tensor | None) -> Tensor:
        return nothing if x is None else x.detach().float().clone().contiguous()

    def taps(weight: Tensor) -> Tensor:  # [C, 1, 3, 3] → [9, C]
        return copy(weight.flatten(1).t())

    norms = [layer_norm(norm) for norm in (block.norm1, block.norm2)]
    conv = mlp.conv if isinstance(mlp, ConvMlp) else None
    return Vit3BlockParameters(
        *(taps(block.cpe.weight), copy(block.cpe.bias)),
        *(copy(x) for norm in norms for x in (norm.weight, norm.bias)),
        nothing,
        *(pack(ttt.qkv.weight, dtype, of_block=True), copy(ttt.qkv.bias)),
        copy(torch.cat((ttt.w2, ttt.w1), dim=-1)),
        taps(ttt.w3),
        *(pack(ttt.proj.weight, dtype, of_block=True), copy(ttt.proj.bias)),
        *(pack(mlp.fc1.weight, dtype, of_block=True), copy(mlp.fc1.bias)),
        *(pack(mlp.fc2.weight, dtype, of_block=True), copy(mlp.fc2.bias)),
        nothing if conv is None else taps(conv.weight),
        nothing if conv is None else copy(conv.bias),
        nothing,
    )
