"""The blocks of ViT³, H-ViT³ and DiT³ on packed weights."""

from __future__ import annotations

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F

from vision_ttt.acceleration.packed_block import PackedBlock
from vision_ttt.acceleration.supported_parts import (
    UnsupportedPart,
    require,
    require_affine,
    require_linear,
)
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
from vision_ttt.ops.packed import pack, packed_linear, packed_vit3_block
from vision_ttt.ops.packed.vit3_block import BLOCK
from vision_ttt.ops.vit3_ttt.descent import LOSS_SCALE


class PackedVit3Block(PackedBlock):
    """:class:`vision_ttt.layers.ViT3Block` for evaluation on a CPU."""

    kind = ViT3Block

    def __init__(self, block: nn.Module, dtype: torch.dtype) -> None:
        require_supported_parts(block, self.kind)
        dim = block.ttt.proj.out_features
        super().__init__(BLOCK, dtype, dim, sizes_of(block), parameters_of(block))
        self.eps = eps_of(block)

    def forward(self, y: Tensor, grid: tuple[int, int], rotations: Tensor | None = None) -> Tensor:
        """Run the block; ``rotations`` as in :meth:`vision_ttt.layers.ViT3TTT.forward`.

        Raises:
            ValueError: T is not h · w.
        """
        return self._run(y, grid, rotations=None if rotations is None else rotations.float())

    def _run(self, y: Tensor, grid: tuple[int, int], **given: Tensor | None) -> Tensor:
        check_grid(y.shape[1], grid)
        return packed_vit3_block(
            y.float(),  # autocast gives maps in another dtype
            self.weights,
            self.sizes,
            grid=grid,
            loss_scale=LOSS_SCALE,
            eps=self.eps,
            **given,
        )


class PackedDit3Block(PackedVit3Block):
    """:class:`vision_ttt.layers.DiT3Block` for evaluation on a CPU."""

    kind = DiT3Block

    def __init__(self, block: DiT3Block, dtype: torch.dtype) -> None:
        super().__init__(block, dtype)
        require(block.modulation, "modulation", nn.Sequential)
        silu, projection = block.modulation
        require(silu, "modulation.0", nn.SiLU)
        require_linear(projection, "modulation.1", bias=True)
        self.register_buffer("modulation_weight", pack(projection.weight, dtype))
        # The block multiplies by 1 + scale, the op by its argument: the bias includes the 1.
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


def _layer_norms(block: nn.Module) -> list[nn.LayerNorm]:
    norms = block.norm1, block.norm2
    return [norm.norm if isinstance(norm, AdaptiveNorm) else norm for norm in norms]


def require_supported_parts(block: nn.Module, kind: type[nn.Module]) -> None:
    """Require that a block computes what its class does: own parts, unchanged, without hooks.

    Raises:
        UnsupportedPart: a part is another, or was changed.
    """
    require(block, "it", kind)
    require(block.cpe, "cpe", ResidualConv2d)
    require(block.ttt, "ttt", ViT3TTT)
    is_dit3 = isinstance(block, DiT3Block)
    require(block.mlp, "mlp", *((TanhMlp,) if is_dit3 else (Mlp, ConvMlp)))
    for path in ("norm1", "norm2"):
        norm = block.get_submodule(path)
        if is_dit3:
            require(norm, path, AdaptiveNorm)
            require(norm.norm, path, nn.LayerNorm)
        else:
            require_affine(norm, path)
    require(block.ttt.qkv, "ttt.qkv", nn.Linear)  # with a bias or without
    for path in ("ttt.proj", "mlp.fc1", "mlp.fc2"):
        require_linear(block.get_submodule(path), path, bias=True)
    convolutions = [block.cpe]
    if isinstance(block.mlp, ConvMlp):
        require(block.mlp.conv, "mlp.conv", ResidualConv2d)
        convolutions.append(block.mlp.conv)
    if any(conv.kernel_size != (3, 3) for conv in convolutions):
        raise UnsupportedPart("a convolution is not 3 x 3")
    if hasattr(block, "drop_path"):
        require(block.drop_path, "drop_path", DropPath, nn.Identity)


def sizes_of(block: nn.Module) -> dict[str, int]:
    """The block's sizes by the names that the op gives them, but for ``is_bfloat16``."""
    return {
        "heads": block.ttt.num_heads,
        "hidden": block.mlp.fc1.out_features,
        "tanh_gelu": int(isinstance(block.mlp, TanhMlp)),
        "convolved": int(isinstance(block.mlp, ConvMlp)),
        "modulated": int(isinstance(block, DiT3Block)),
    }


def eps_of(block: nn.Module) -> tuple[float, ...]:
    """The op's ``eps``."""
    return tuple(norm.eps for norm in _layer_norms(block))


def parameters_of(block: nn.Module) -> dict[str, Tensor | None]:
    """The block's parameters by the names that the op gives them."""
    ttt, mlp = block.ttt, block.mlp
    conv = mlp.conv if isinstance(mlp, ConvMlp) else None
    linears = {"qkv": ttt.qkv, "proj": ttt.proj, "fc1": mlp.fc1, "fc2": mlp.fc2}
    no_bias = ttt.qkv.weight.new_zeros(ttt.qkv.out_features)
    norms = {f"norm{i}": norm for i, norm in enumerate(_layer_norms(block), 1)}
    return {
        "conv2d": block.cpe.weight.flatten(1).t(),
        "conv2d_bias": block.cpe.bias,
        **{f"{name}.weight": norm.weight for name, norm in norms.items()},
        **{f"{name}.bias": norm.bias for name, norm in norms.items()},
        **{name: linear.weight for name, linear in linears.items()},
        **{f"{name}.bias": linear.bias for name, linear in linears.items()},
        "qkv.bias": no_bias if ttt.qkv.bias is None else ttt.qkv.bias,
        "units": torch.cat((ttt.w2, ttt.w1), dim=-1),
        "kernels": ttt.w3.flatten(1).t(),
        "mlp_conv": None if conv is None else conv.weight.flatten(1).t(),
        "mlp_conv_bias": None if conv is None else conv.bias,
    }
