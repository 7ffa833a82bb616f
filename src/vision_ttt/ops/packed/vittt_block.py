"""The op ``vision_ttt::packed_vittt_block``: a whole Vittt block, its weights packed."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vision_ttt.ops._learner_kernels import (
    DIMENSIONS,
    LARGEST_MINI_BATCH,
    _Convolution,
    _State,
)
from vision_ttt.ops._native import LANES, LIBRARY, call_kernel, mirrors
from vision_ttt.ops._table import TABLE
from vision_ttt.ops.packed.weights import (
    DTYPES,
    NormStructure,
    PackedStructure,
    as_it_lies,
    packed_shape,
)


class VitttBlockParameters(NamedTuple):
    """A block's parameters; empty where it has no such part.

    D channels, R directions, H heads of both with d channels each, H · d = R · D; E = 4 d in an
    inner MLP. Packed ones of one dtype, the others float32.
    """

    conv2d: Tensor  # [K · K, D]
    norm_weight: Tensor  # [D]
    norm_bias: Tensor
    views: Tensor  # packed [2 R D or 3 R D, D]: k, q where it is not k, v
    gate: Tensor  # packed [D, D]
    rates: Tensor  # packed [H, D]
    rates_bias: Tensor  # [H]
    conv_q_weight: Tensor  # [R D, taps]
    conv_q_bias: Tensor  # [R D]
    conv_k_weight: Tensor
    conv_k_bias: Tensor
    w1: Tensor  # [H, d, d], or [H, d, E]
    b1: Tensor  # [H, d], or [H, E]
    w2: Tensor  # [H, E, d]
    b2: Tensor  # [H, d]
    inner_weight: Tensor  # [H, d]
    inner_bias: Tensor
    position_scale: Tensor  # [R, b]
    post_weight: Tensor  # [R, D]
    post_bias: Tensor
    out_proj: Tensor  # packed [D, D]
    mlp_norm_weight: Tensor  # [D]
    mlp_norm_bias: Tensor
    mlp_gate: Tensor  # packed [hidden, D]
    mlp_value: Tensor  # packed [hidden, D]
    mlp_out: Tensor  # packed [D, hidden]


PACKED = ("views", "gate", "rates", "out_proj", "mlp_gate", "mlp_value", "mlp_out")

_INTS = "height", "width", "heads", "directions", "taps", "hidden", "mini_batch_size"
_FLOATS = "rate", "norm_eps", "inner_eps", "post_eps", "mlp_norm_eps"


def packed_vittt_block(
    y: Tensor,
    parameters: VitttBlockParameters,
    *,
    grid: tuple[int, int],
    heads: int,
    directions: int,
    taps: int,
    hidden: int,
    mini_batch_size: int,
    rate: float,
    eps: tuple[float, float, float, float],
) -> Tensor:
    """One block of Vision-TTT (Eq. 9 and Algorithm 1): inference on a CPU.

    Products are of numbers in the packed weights' dtype, and so are the views in bfloat16; sums,
    norms, inner states and the tokens themselves are float32.

    Args:
        y: tokens [B, T, D], float32. It is left as it is.
        parameters: the block's.
        grid: (h, w) with T = h · w; any where there is no Conv2d.
        heads: H, of both directions.
        directions: R, 1 or 2.
        taps: of the Conv1d, 0 for none.
        hidden: of the SwiGLU.
        mini_batch_size: b.
        rate: η_base / d.
        eps: added to the variances of the norm, the inner norm, the post norms, the MLP's norm.

    Returns:
        [B, T, D].

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: the tensors and numbers are not one block's, or of sizes that the kernels do not
            take, or those are missing.
    """
    ints = [*grid, heads, directions, taps, hidden, mini_batch_size]
    return torch.ops.vision_ttt.packed_vittt_block(y, list(parameters), ints, [rate, *eps])


torch.library.define(
    "vision_ttt::packed_vittt_block",
    "(Tensor y, Tensor[] parameters, SymInt[] ints, float[] floats) -> Tensor",
)


@mirrors("PackedVitttBlock")
class _PackedVitttBlock(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("y", "out", "scratch", "conv2d")),
        *((name, NormStructure) for name in ("norm", "mlp_norm")),
        *((name, PackedStructure) for name in PACKED),
        *((name, _Convolution) for name in ("conv_q", "conv_k")),
        ("initial", _State),
        *((name, c_void_p) for name in ("inner_weight", "inner_bias", "scale")),
        *((name, c_void_p) for name in ("post_weight", "post_bias")),
        *((name, c_int64) for name in ("batch", "length", "height", "width", "dim", "heads")),
        *((name, c_int64) for name in ("directions", "kernel", "taps", "shared_qk", "is_mlp")),
        *((name, c_int64) for name in ("mini_batch_size", "is_bfloat16", "threads")),
        *((name, c_float) for name in ("inner_eps", "post_eps", "rate")),
    )


if LIBRARY is not None:
    LIBRARY.vision_ttt_packed_vittt_block_scratch.restype = c_int64


def refusal(dim: int, head_dim: int, mini_batch_size: int, hidden: int) -> str | None:
    """Why the kernels take no block of such sizes, or None if they do."""
    if LIBRARY is None:
        return "the compiled kernels are missing"
    if head_dim not in DIMENSIONS:
        return f"head dimension {head_dim} is not one of {DIMENSIONS}"
    if mini_batch_size > LARGEST_MINI_BATCH:
        return f"mini_batch_size {mini_batch_size} is over {LARGEST_MINI_BATCH}"
    for name, size in (("dim", dim), ("hidden", hidden)):
        if size % LANES:
            return f"{name} {size} is not a multiple of {LANES}"
    return None


@functools.lru_cache(maxsize=256)
def _check(
    y: torch.Size,
    shapes: tuple[torch.Size, ...],
    dtypes: tuple[torch.dtype, ...],
    ints: tuple[int, ...],
) -> None:
    """Raise unless tensors of these shapes and dtypes and these numbers are one block's."""
    if len(shapes) != len(VitttBlockParameters._fields) or len(ints) != len(_INTS):
        raise ValueError(
            f"packed_vittt_block: needs {len(VitttBlockParameters._fields)} parameters and "
            f"{_INTS}, got {len(shapes)} and {len(ints)} numbers"
        )
    has = dict(zip(VitttBlockParameters._fields, shapes, strict=True))
    height, width, heads, directions, taps, hidden, mini_batch_size = ints
    if len(y) != 3 or min(height, width, heads, hidden, mini_batch_size) < 1 or taps < 0:
        raise ValueError(f"packed_vittt_block: y must be [B, T, D], got {list(y)} and {ints}")
    dim = y[2]
    inner = directions * dim
    if directions not in (1, 2) or inner % heads or heads % directions:
        raise ValueError(f"packed_vittt_block: {heads} heads in {directions} directions of {dim}")
    head_dim = inner // heads
    reason = refusal(dim, head_dim, mini_batch_size, hidden)
    if reason:
        raise ValueError(f"packed_vittt_block: {reason}")
    given = dict(zip(has, dtypes, strict=True))
    dtype = given["out_proj"]
    views = {packed_shape(n * inner, dim, dtype): n for n in (2, 3)}
    taken = views.get(tuple(has["views"]), 2)
    kernel = round(has["conv2d"][0] ** 0.5) if len(has["conv2d"]) == 2 else 1
    two_layers, convolved = has["w2"].numel() > 0, taps > 0
    wide = 4 * head_dim if two_layers else head_dim
    wanted: dict[str, tuple[int, ...]] = {
        "conv2d": (kernel * kernel, dim) if has["conv2d"].numel() else (0,),
        **dict.fromkeys(("norm_weight", "norm_bias", "mlp_norm_weight", "mlp_norm_bias"), (dim,)),
        "views": packed_shape(taken * inner, dim, dtype),
        "gate": packed_shape(dim, dim, dtype) if has["gate"].numel() else (0,),
        "rates": packed_shape(heads, dim, dtype),
        "rates_bias": (heads,),
        **dict.fromkeys(("conv_q_weight", "conv_k_weight"), (inner, taps) if convolved else (0,)),
        **dict.fromkeys(("conv_q_bias", "conv_k_bias"), (inner,) if convolved else (0,)),
        "w1": (heads, head_dim, wide),
        "b1": (heads, wide),
        "w2": (heads, wide, head_dim) if two_layers else (0,),
        "b2": (heads, head_dim) if two_layers else (0,),
        **dict.fromkeys(("inner_weight", "inner_bias"), (heads, head_dim)),
        "position_scale": (directions, mini_batch_size),
        **dict.fromkeys(("post_weight", "post_bias"), (directions, dim)),
        "out_proj": packed_shape(dim, dim, dtype),
        **dict.fromkeys(("mlp_gate", "mlp_value"), packed_shape(hidden, dim, dtype)),
        "mlp_out": packed_shape(dim, hidden, dtype),
    }
    for name, shape in wanted.items():
        if has[name] != shape:
            raise ValueError(
                f"packed_vittt_block: {name} must be {list(shape)}, got {list(has[name])}"
            )
        right = dtype if name in PACKED and has[name].numel() else torch.float32
        if (has[name].numel() and given[name] != right) or dtype not in DTYPES:
            raise TypeError(f"packed_vittt_block: {name} must be {right}, got {given[name]}")
    if kernel % 2 == 0:
        raise ValueError(f"packed_vittt_block: conv2d's kernel must be odd, got {kernel}")
    if has["conv2d"].numel() and y[1] != height * width:
        raise ValueError(f"packed_vittt_block: {y[1]} tokens are no grid of {height} x {width}")


@torch.library.impl("vision_ttt::packed_vittt_block", "CPU")
def _packed_vittt_block(
    y: Tensor, parameters: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]
) -> Tensor:
    if len(floats) != len(_FLOATS) or y.dtype != torch.float32:
        raise TypeError(
            f"packed_vittt_block: y must be float32 and floats {_FLOATS}, got {y.dtype}, {floats}"
        )
    shapes, dtypes = tuple(x.shape for x in parameters), tuple(x.dtype for x in parameters)
    _check(y.shape, shapes, dtypes, tuple(ints))
    if any(not x.is_cpu or x.layout != torch.strided for x in (y, *parameters)):
        raise ValueError("packed_vittt_block: takes dense tensors on a CPU, got others")
    if not y.numel():
        return y.new_empty(y.shape)
    y = as_it_lies(y).contiguous()
    p = VitttBlockParameters(*(as_it_lies(x).contiguous() for x in parameters))
    height, width, heads, directions, taps, hidden, mini_batch_size = ints
    rate, norm_eps, inner_eps, post_eps, mlp_norm_eps = floats
    dim, inner, is_bfloat16 = y.shape[2], directions * y.shape[2], p.views.dtype == torch.bfloat16
    columns = p.views.numel() // dim
    problem = _PackedVitttBlock(
        *(y.data_ptr(), None, None, p.conv2d.data_ptr() or None),
        NormStructure.of(p.norm_weight, p.norm_bias, norm_eps),
        NormStructure.of(p.mlp_norm_weight, p.mlp_norm_bias, mlp_norm_eps),
        PackedStructure.of(p.views, None, columns, dim),
        PackedStructure.of(p.gate, None, dim, dim),
        PackedStructure.of(p.rates, p.rates_bias, heads, dim),
        PackedStructure.of(p.out_proj, None, dim, dim),
        PackedStructure.of(p.mlp_gate, None, hidden, dim),
        PackedStructure.of(p.mlp_value, None, hidden, dim),
        PackedStructure.of(p.mlp_out, None, dim, hidden),
        _Convolution(p.conv_q_weight.data_ptr() or None, p.conv_q_bias.data_ptr() or None),
        _Convolution(p.conv_k_weight.data_ptr() or None, p.conv_k_bias.data_ptr() or None),
        _State.of((p.w1, p.b1, p.w2, p.b2)),
        *(p.inner_weight.data_ptr(), p.inner_bias.data_ptr(), p.position_scale.data_ptr()),
        *(p.post_weight.data_ptr(), p.post_bias.data_ptr()),
        *(y.shape[0], y.shape[1], height, width, dim, heads),
        *(directions, round(p.conv2d.shape[0] ** 0.5) if p.conv2d.numel() else 0, taps),
        *(columns == 2 * inner, p.w2.numel() > 0, mini_batch_size, is_bfloat16),
        *(torch.get_num_threads(), inner_eps, post_eps, rate),
    )
    scratch = y.new_empty(
        LIBRARY.vision_ttt_packed_vittt_block_scratch(ctypes.byref(problem)), dtype=torch.uint8
    )
    # After the scratch: beside the hole that it leaves, the next block's finds place again.
    out = y.new_empty(y.shape)
    problem.scratch, problem.out = scratch.data_ptr(), out.data_ptr()
    if call_kernel("vision_ttt_packed_vittt_block", problem):
        raise MemoryError("vision_ttt::packed_vittt_block: no memory for the scratch of a thread")
    return out


@torch.library.register_fake("vision_ttt::packed_vittt_block")
def _(y: Tensor, *_: object) -> Tensor:
    return y.new_empty(y.shape)


@register_flop_formula(torch.ops.vision_ttt.packed_vittt_block)
def packed_vittt_block_flops(
    y: Sequence[int], shapes: Sequence[Sequence[int]], ints: Sequence[int], *_: object, **__: object
) -> int:
    """Those of the block's products, convolutions and its learner."""
    p = VitttBlockParameters(*shapes)
    batch, length, dim = y
    _, _, heads, directions, taps, hidden, mini_batch_size = ints
    inner = directions * dim
    weights = math.prod(p.views) + math.prod(p.gate) + math.prod(p.conv2d)
    weights += heads * dim + dim * dim + 3 * hidden * dim + 2 * inner * taps
    views = [batch, length, heads, inner // heads]
    op = TABLE["ttt_mlp" if p.w2[0] else "ttt_linear"]
    inner = op.inputs(*[None] * op.width)._replace(q=views, mini_batch_size=mini_batch_size)
    learner = op.flops(inner._replace(w1=p.w1) if p.w2[0] else inner)
    return 2 * batch * length * weights + learner
