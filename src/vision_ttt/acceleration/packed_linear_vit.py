"""The blocks of linearised ViTs on packed weights."""

from __future__ import annotations

from collections.abc import Sequence

import timm.layers
import torch
from timm.layers.activations import GELU, GELUTanh, QuickGELU
from torch import Tensor, nn

from vision_ttt.acceleration.packed_block import PackedBlock
from vision_ttt.acceleration.supported_parts import OtherDesign, UnsupportedPart, require
from vision_ttt.layers import ResidualConv2d, TTTAttention
from vision_ttt.layers.attention_inner import INNER_MODELS, KEY_EPS, SwiGLUInner
from vision_ttt.layers.extra_tokens import merge_extra, split_extra
from vision_ttt.layers.grid import check_grid
from vision_ttt.models.linear_vit import LinearBlock
from vision_ttt.ops.packed import packed_swiglu_ttt_block
from vision_ttt.ops.packed.swiglu_ttt_block import BLOCK

_NORMS = (nn.LayerNorm, timm.layers.LayerNorm)
_OTHER_NORMS = (timm.layers.RmsNorm, timm.layers.LayerNormFp32, timm.layers.RmsNormFp32)
_OTHER_MLPS = (timm.layers.GluMlp, timm.layers.SwiGLU)
_OTHER_ACTIVATIONS = (nn.SiLU, nn.ReLU, QuickGELU)
_SKIPPED = (nn.Identity, nn.Dropout, timm.layers.DropPath)
"""Modules that compute nothing in evaluation mode."""


class PackedLinearBlock(PackedBlock):
    """:class:`vision_ttt.models.linear_vit.LinearBlock` for evaluation on a CPU.

    It supports SwiGLU inner models in a ViT whose queries, keys and MLP have no norms and whose MLP
    has a GELU.

    Raises:
        OtherDesign: the block is another, or the kernels do not support its sizes.
        UnsupportedPart: a part was changed or has a hook.
    """

    kind = LinearBlock

    def __init__(self, block: LinearBlock, dtype: torch.dtype) -> None:
        _require_supported_parts(block)
        attention, act = block.attn, block.mlp.act
        sizes = {
            "heads": attention.num_heads,
            "hidden": block.mlp.fc1.out_features,
            "scaled": int(isinstance(block.ls1, timm.layers.LayerScale)),
            "rotate_half": int(attention.rotate_half),
            "tanh_gelu": int(type(act) is GELUTanh or getattr(act, "approximate", "") == "tanh"),
        }
        dim = attention.proj.out_features
        if attention.num_heads * attention.head_dim != dim:
            raise OtherDesign(f"its heads have {attention.head_dim} channels each")
        if reason := BLOCK.unsupported(dim, BLOCK.sizes(**sizes, is_bfloat16=0)):
            raise OtherDesign(reason)
        super().__init__(BLOCK, dtype, dim, sizes, _parameters_of(block))
        self.eps = (block.norm1.eps, block.norm2.eps)

    def forward(
        self,
        x: Tensor,
        grid: tuple[int, int],
        extra: Sequence[int] = (),
        rotations: Tensor | None = None,
    ) -> Tensor:
        """Run the block; see :class:`vision_ttt.models.linear_vit.LinearBlock`.

        Raises:
            ValueError: N does not fit the grid.
        """
        check_grid(x.shape[1], grid, len(extra))
        x = x.float()  # autocast gives another dtype
        rotations = None if rotations is None else rotations.float()
        is_prefix = tuple(extra) == tuple(range(len(extra)))
        if not is_prefix:  # the op expects them before the tokens of the grid
            image, others = split_extra(x, extra)
            x = torch.cat((others, image), dim=1)
        out = packed_swiglu_ttt_block(
            x,
            self.weights,
            self.sizes,
            grid=grid,
            key_eps=KEY_EPS,
            eps=self.eps,
            rotations=rotations,
        )
        if is_prefix:
            return out
        others, image = out.tensor_split([len(extra)], dim=1)
        return merge_extra(image, others, extra)


def _require_supported_parts(block: LinearBlock) -> None:
    """Require that a block computes what the op does: known parts, unchanged, without hooks.

    Raises:
        OtherDesign: the block is another.
        UnsupportedPart: a part was changed or has a hook.
    """
    require(block, "it", LinearBlock)
    attention, mlp = block.attn, block.mlp
    require(attention, "attn", TTTAttention)
    others = tuple(kind for kind in INNER_MODELS.values() if kind is not SwiGLUInner)
    _require_design(attention.inner, "attn.inner", (SwiGLUInner,), others)
    _require_design(mlp, "mlp", (timm.layers.Mlp,), _OTHER_MLPS)
    _require_design(mlp.act, "mlp.act", (nn.GELU, GELU, GELUTanh), _OTHER_ACTIVATIONS)
    for path in ("norm1", "norm2"):
        norm = block.get_submodule(path)
        _require_design(norm, path, _NORMS, _OTHER_NORMS)
        if norm.weight is None:
            raise OtherDesign(f"{path} has no weight")
    for path in ("attn.q_norm", "attn.k_norm", "attn.norm", "mlp.norm"):
        others = (*_NORMS, *_OTHER_NORMS)
        _require_design(block.get_submodule(path), path, (nn.Identity,), others)
    for path in ("q_conv", "k_conv"):
        require(attention.inner.get_submodule(path), f"attn.inner.{path}", ResidualConv2d)
    for path in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"):
        require(block.get_submodule(path), path, nn.Linear)
    for path in ("proj_drop", "drop_path1", "drop_path2", "mlp.drop1", "mlp.drop2"):
        require(block.get_submodule(path), path, *_SKIPPED)
    for path in ("ls1", "ls2"):
        require(block.get_submodule(path), path, nn.Identity, timm.layers.LayerScale)
    if type(block.ls1) is not type(block.ls2):
        raise UnsupportedPart("one of ls1 and ls2 is a LayerScale, the other is none")


def _require_design(
    module: nn.Module, path: str, kinds: tuple[type, ...], others: tuple[type, ...]
) -> None:
    """Require a plain module of the kinds of the op's design.

    Raises:
        OtherDesign: it is of another design's kinds.
        UnsupportedPart: see :func:`require`.
    """
    if type(module) in others:
        raise OtherDesign(f"{path} is a {type(module).__name__}")
    require(module, path, *kinds)


def _parameters_of(block: LinearBlock) -> dict[str, Tensor | None]:
    """The block's parameters by the names that the op gives them."""
    attention, mlp = block.attn, block.mlp
    inner = attention.inner
    linears = {"qkv": attention.qkv, "proj": attention.proj, "fc1": mlp.fc1, "fc2": mlp.fc2}
    affine = {"norm1": block.norm1, "norm2": block.norm2}
    convolutions = {"q_conv": inner.q_conv, "k_conv": inner.k_conv}
    scales = {"gate1": block.ls1, "gate2": block.ls2}
    return {
        **{name: linear.weight for name, linear in linears.items()},
        **{f"{name}.bias": _bias(linear) for name, linear in linears.items()},
        **{f"{name}.weight": norm.weight for name, norm in affine.items()},
        **{f"{name}.bias": _bias(norm) for name, norm in affine.items()},
        **{name: getattr(scale, "gamma", None) for name, scale in scales.items()},
        **{name: conv.weight.flatten(1).t() for name, conv in convolutions.items()},
        **{f"{name}_bias": conv.bias for name, conv in convolutions.items()},
        "units": torch.cat((inner.w1, inner.w2), dim=-1),
        "out_units": inner.w3,
    }


def _bias(layer: nn.Linear | nn.LayerNorm) -> Tensor:
    """The layer's bias, zeros where it has none."""
    return layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias
