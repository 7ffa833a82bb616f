"""The op ``vision_ttt::packed_vittt_blocks``: whole Vittt blocks with packed weights."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vision_ttt.ops._contract import check_storages
from vision_ttt.ops._dispatcher_bypass import may_bypass_dispatcher
from vision_ttt.ops._learner_cpu import _Convolution, _State
from vision_ttt.ops._native import mirrors
from vision_ttt.ops._table import TABLE
from vision_ttt.ops.packed.launch import launch
from vision_ttt.ops.packed.parameter_vector import WORD
from vision_ttt.ops.packed.vittt_block_weights import (
    PACKED,
    VitttBlockParameters,
    VitttBlockSizes,
    layout,
)
from vision_ttt.ops.packed.weights import (
    NormStructure,
    PackedStructure,
    blocks_have_terms,
    resolve_negative,
)

_INTS = ("height", "width", *VitttBlockSizes._fields)
_FLOATS = "rate", "norm_eps", "inner_eps", "post_eps", "mlp_norm_eps"


def packed_vittt_blocks(
    y: Tensor,
    weights: Tensor,
    sizes: VitttBlockSizes,
    *,
    grid: tuple[int, int],
    rate: float,
    eps: tuple[float, float, float, float],
) -> Tensor:
    """Blocks of Vision-TTT (Eq. 9 and Algorithm 1) one after the other, for inference on a CPU.

    Factors of products, and the views, are rounded to the packed weights' dtype. Sums, norms, inner
    states and the tokens are float32.

    Args:
        y: tokens [B, T, D], float32. It is not modified.
        weights: [N, words], of each of N ≥ 1 blocks its parameters from :func:`join_parameters`.
        sizes: of each block.
        grid: (h, w) with T = h · w. Without a Conv2d it is ignored.
        rate: η_base / d.
        eps: added to the variances of the norm, the inner norm, the post norms, the MLP's norm.

    Returns:
        [B, T, D].

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: the tensors and numbers do not fit such blocks, the kernels do not support
            their sizes, or the kernels are missing.
    """
    ints, floats = (*grid, *sizes), (rate, *eps)
    if may_bypass_dispatcher((y, weights)):
        return _packed_vittt_blocks(y, weights, ints, floats)
    return torch.ops.vision_ttt.packed_vittt_blocks(y, weights, list(ints), list(floats))


torch.library.define(
    "vision_ttt::packed_vittt_blocks",
    "(Tensor y, Tensor weights, SymInt[] ints, float[] floats) -> Tensor",
)


@mirrors("PackedVitttBlock")
class _PackedVitttBlock(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("y", "out", "between", "scratch", "conv2d")),
        *((name, NormStructure) for name in ("norm", "mlp_norm")),
        *((name, PackedStructure) for name in PACKED),
        *((name, _Convolution) for name in ("conv_q", "conv_k")),
        ("initial", _State),
        *((name, c_void_p) for name in ("inner_weight", "inner_bias", "scale")),
        *((name, c_void_p) for name in ("post_weight", "post_bias")),
        *((name, c_int64) for name in ("batch", "length", "height", "width", "dim", "heads")),
        *((name, c_int64) for name in ("directions", "kernel", "taps", "shared_qk", "is_mlp")),
        *((name, c_int64) for name in ("mini_batch_size", "is_bfloat16", "threads", "count")),
        *((name, c_float) for name in ("inner_eps", "post_eps", "rate")),
    )


@functools.lru_cache(maxsize=256)
def _check(
    y: torch.Size, weights: torch.Size, ints: tuple[int, ...], floats: tuple[float, ...]
) -> None:
    """Raise an error unless these shapes of tokens and weights and these numbers fit blocks."""
    if len(ints) != len(_INTS) or len(floats) != len(_FLOATS):
        raise ValueError(f"packed_vittt_blocks: needs {_INTS}, {_FLOATS}, got {ints}, {floats}")
    if not all(x >= 0 for x in floats):  # of NaN, too; a negative rate has a meaning to the learner
        raise ValueError(f"packed_vittt_blocks: {_FLOATS} must be at least 0, got {floats}")
    height, width, *sizes = ints
    if len(y) != 3 or min(height, width) < 1:
        raise ValueError(f"packed_vittt_blocks: y must be [B, T, D], got {list(y)} and {ints}")
    sizes = VitttBlockSizes(*sizes)
    words = layout(y[2], sizes)[-1].end
    if len(weights) != 2 or weights[1] != words or not weights[0]:
        raise ValueError(
            f"packed_vittt_blocks: weights must be [N ≥ 1, {words}] for {y[2]} channels and "
            f"{sizes}, got {list(weights)}"
        )
    if sizes.kernel and y[1] != height * width:
        raise ValueError(f"packed_vittt_blocks: {y[1]} tokens do not fill {height} x {width}")


@functools.lru_cache(maxsize=256)
def _describe(
    y: torch.Size,
    weights: int,
    blocks: int,
    ints: tuple[int, ...],
    floats: tuple[float, ...],
) -> ctypes.Array[_PackedVitttBlock]:
    """Describe so many blocks whose weights [blocks, words] begin at an address.

    The description holds addresses only; the caller must keep the weights alive.
    """
    stride = WORD.itemsize * layout(y[2], VitttBlockSizes(*ints[2:]))[-1].end
    described = (_PackedVitttBlock * blocks)(
        *(_describe_block(y, weights + i * stride, ints, floats) for i in range(blocks))
    )
    described[0].count = blocks
    return described


def _describe_block(
    y: torch.Size, weights: int, ints: tuple[int, ...], floats: tuple[float, ...]
) -> _PackedVitttBlock:
    batch, length, dim = y
    height, width, *sizes = ints
    s = VitttBlockSizes(*sizes)
    rate, norm_eps, inner_eps, post_eps, mlp_norm_eps = floats
    p = VitttBlockParameters(
        *(weights + WORD.itemsize * x.start if x.words else None for x in layout(dim, s))
    )
    inner = s.directions * dim
    in_terms = blocks_have_terms(torch.bfloat16 if s.is_bfloat16 else torch.float32)
    return _PackedVitttBlock(
        *(None, None, None, None, p.conv2d),
        NormStructure(p.norm_weight, p.norm_bias, 0, norm_eps),
        NormStructure(p.mlp_norm_weight, p.mlp_norm_bias, 0, mlp_norm_eps),
        PackedStructure(p.views, None, dim, s.views * inner, in_terms),
        PackedStructure(p.gate, None, dim, dim, in_terms),
        PackedStructure(p.rates, p.rates_bias, dim, s.heads, in_terms),
        PackedStructure(p.out_proj, None, dim, dim, in_terms),
        PackedStructure(p.mlp_gate, None, dim, s.hidden, in_terms),
        PackedStructure(p.mlp_value, None, dim, s.hidden, in_terms),
        PackedStructure(p.mlp_out, None, s.hidden, dim, in_terms),
        _Convolution(p.conv_q_weight, p.conv_q_bias),
        _Convolution(p.conv_k_weight, p.conv_k_bias),
        _State(p.w1, p.b1, p.w2, p.b2),
        *(p.inner_weight, p.inner_bias, p.position_scale),
        *(p.post_weight, p.post_bias),
        *(batch, length, height, width, dim, s.heads),
        *(s.directions, s.kernel, s.taps, s.views == 2, s.is_mlp),
        *(s.mini_batch_size, s.is_bfloat16, 0, 0),
        *(inner_eps, post_eps, rate),
    )


def _packed_vittt_blocks(
    y: Tensor, weights: Tensor, ints: Sequence[int], floats: Sequence[float]
) -> Tensor:
    for name, tensor in (("y", y), ("weights", weights)):
        if not isinstance(tensor, Tensor):  # PyTorch passes None for a tensor without complaint
            raise TypeError(f"packed_vittt_blocks: {name} must be a tensor, got {tensor!r}")
    if y.dtype != torch.float32 or weights.dtype != WORD:
        raise TypeError(
            f"packed_vittt_blocks: y must be float32 and weights {WORD}, got {y.dtype}, "
            f"{weights.dtype}"
        )
    ints, floats = tuple(ints), tuple(floats)
    _check(y.shape, weights.shape, ints, floats)
    if any(not x.is_cpu or x.layout != torch.strided for x in (y, weights)):
        got = sorted({f"{x.layout} on {x.device}" for x in (y, weights)})
        raise ValueError(f"packed_vittt_blocks: tensors must be dense and on a CPU, got {got}")
    check_storages("packed_vittt_blocks", {"y": y, "weights": weights})
    if not y.numel():
        return y.new_empty(y.shape)
    y, weights = (resolve_negative(x).contiguous() for x in (y, weights))
    described = _describe(y.shape, weights.data_ptr(), len(weights), ints, floats)
    # A copy, because the description is cached and a launch writes to it.
    first = type(described).from_buffer_copy(described)[0]
    between = y.new_empty(y.shape if len(weights) > 1 else 0)
    first.between = between.data_ptr()
    return launch("vision_ttt_packed_vittt_blocks", first, y)


torch.library.impl("vision_ttt::packed_vittt_blocks", "CPU", _packed_vittt_blocks)


@torch.library.register_fake("vision_ttt::packed_vittt_blocks")
def _(y: Tensor, *_: object) -> Tensor:
    return y.new_empty(y.shape)


@register_flop_formula(torch.ops.vision_ttt.packed_vittt_blocks)
def packed_vittt_blocks_flops(
    y: Sequence[int], weights: Sequence[int], ints: Sequence[int], *_: object, **__: object
) -> int:
    """FLOPs of the blocks' products, convolutions and learners."""
    batch, length, dim = y
    s = VitttBlockSizes(*ints[2:])
    p = VitttBlockParameters(*(place.shape for place in layout(dim, s)))
    inner = s.directions * dim
    products = s.views * inner * dim + s.gated * dim * dim + math.prod(p.conv2d)
    products += s.heads * dim + dim * dim + 3 * s.hidden * dim + 2 * inner * s.taps
    views = [batch, length, s.heads, inner // s.heads]
    op = TABLE["ttt_mlp" if s.is_mlp else "ttt_linear"]
    inputs = op.inputs(*[None] * op.width)._replace(q=views, mini_batch_size=s.mini_batch_size)
    learner = op.flops(inputs._replace(w1=p.w1) if s.is_mlp else inputs)
    return weights[0] * (2 * batch * length * products + learner)
