"""The op ``vision_ttt::packed_vittt_blocks``: whole Vittt blocks with packed weights."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._contract import Real, Whole
from vision_ttt.ops._learner_cpu import (
    DIMENSIONS,
    LARGEST_MINI_BATCH,
    _Convolution,
    _State,
)
from vision_ttt.ops._native import mirrors, no_vectors
from vision_ttt.ops._op import Backend, Op
from vision_ttt.ops._table import TABLE
from vision_ttt.ops.packed.block import FLAG, Block, define
from vision_ttt.ops.packed.linear import multiply
from vision_ttt.ops.packed.weights import NormStructure, PackedStructure, call


class VitttBlockSizes(NamedTuple):
    """The numbers that, with D, determine the shapes of a block's parameters."""

    heads: int  # H, of both directions
    directions: int  # R, 1 or 2
    taps: int  # of the Conv1d; 0: none
    hidden: int  # of the SwiGLU
    mini_batch_size: int  # b
    kernel: int  # K of the Conv2d, odd; 0: none
    views: int  # 2 where q is k, or 3
    gated: int  # 0 or 1
    is_mlp: int  # 0 or 1: the inner model has two layers
    is_bfloat16: int  # 0 or 1: the packed weights are bfloat16


_PARAMETERS = {
    "conv2d": "kernel_area dim if kernel",
    "norm.weight": "dim",
    "norm.bias": "dim",
    "views": "packed columns dim",  # k, q where it is not k, v
    "gate": "packed dim dim if gated",
    "rates": "packed heads dim",
    "rates.bias": "heads",
    "conv_q.weight": "inner taps if taps",
    "conv_q.bias": "inner if taps",
    "conv_k.weight": "inner taps if taps",
    "conv_k.bias": "inner if taps",
    "initial.w1": "heads d wide",
    "initial.b1": "heads wide",
    "initial.w2": "heads wide d if is_mlp",
    "initial.b2": "heads d if is_mlp",
    "inner_weight": "heads d",
    "inner_bias": "heads d",
    "scale": "directions mini_batch_size",
    "post_weight": "directions dim",
    "post_bias": "directions dim",
    "out_proj": "packed dim dim",
    "mlp_norm.weight": "dim",
    "mlp_norm.bias": "dim",
    "mlp_gate": "packed hidden dim",
    "mlp_value": "packed hidden dim",
    "mlp_out": "packed dim hidden",
}


@mirrors("PackedVitttBlock")
class _PackedVitttBlock(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("y", "out", "between", "scratch", "conv2d")),
        *((name, NormStructure) for name in ("norm", "mlp_norm")),
        *((name, PackedStructure) for name in ("views", "gate", "rates", "out_proj")),
        *((name, PackedStructure) for name in ("mlp_gate", "mlp_value", "mlp_out")),
        *((name, _Convolution) for name in ("conv_q", "conv_k")),
        ("initial", _State),
        *((name, c_void_p) for name in ("inner_weight", "inner_bias", "scale")),
        *((name, c_void_p) for name in ("post_weight", "post_bias")),
        *((name, c_int64) for name in ("batch", "length", "height", "width", "dim", "heads")),
        *((name, c_int64) for name in ("directions", "kernel", "taps", "shared_qk", "is_mlp")),
        *((name, c_int64) for name in ("mini_batch_size", "is_bfloat16", "threads", "count")),
        *((name, c_float) for name in ("inner_eps", "post_eps", "rate")),
    )


def _derive(s: Mapping[str, int]) -> dict[str, int]:
    inner, heads, kernel = s["directions"] * s["dim"], s["heads"], s["kernel"]
    if kernel and kernel % 2 == 0:
        raise ValueError(f"packed_vittt_blocks: conv2d's kernel must be odd, got {kernel}")
    if inner % heads or heads % s["directions"]:
        raise ValueError(
            f"packed_vittt_blocks: {heads} heads in {s['directions']} directions of {s['dim']}"
        )
    d = inner // heads
    return {
        "kernel_area": kernel * kernel,
        "inner": inner,
        "columns": s["views"] * inner,
        "d": d,
        "wide": 4 * d if s["is_mlp"] else d,
        "shared_qk": int(s["views"] == 2),
    }


def _refuse(s: Mapping[str, int]) -> str | None:
    if s["d"] not in DIMENSIONS:
        return f"head dimension {s['d']} is not one of {DIMENSIONS}"
    if s["mini_batch_size"] > LARGEST_MINI_BATCH:
        return f"mini_batch_size {s['mini_batch_size']} is over {LARGEST_MINI_BATCH}"
    return no_vectors(s["dim"]) or no_vectors(s["hidden"])


def _check_grid(values: Mapping[str, Any], s: Mapping[str, int]) -> None:
    height, width, *_ = values["ints"]
    if s["kernel"] and values["y"].shape[1] != height * width:
        raise ValueError(
            f"packed_vittt_blocks: {values['y'].shape[1]} tokens do not fill {height} x {width}"
        )


BLOCK = Block(
    "packed_vittt_blocks",
    _PackedVitttBlock,
    _PARAMETERS,
    VitttBlockSizes,
    ranges={
        **dict.fromkeys(("taps", "kernel"), Whole(0)),
        **{"directions": Whole(1, 2), "views": Whole(2, 3)},
        **dict.fromkeys(("gated", "is_mlp", "is_bfloat16"), FLAG),
    },
    floats=dict.fromkeys(("rate", "norm.eps", "inner_eps", "post_eps", "mlp_norm.eps"), Real(0)),
    derive=_derive,
    refusal=_refuse,
    has_grid=True,
    further=_check_grid,
)


class Inputs(NamedTuple):
    """The op's arguments; ``ints`` are the grid and the sizes, ``floats`` those of BLOCK."""

    y: Tensor
    weights: Tensor
    ints: Sequence[int]
    floats: Sequence[float]


def packed_vittt_blocks_definition(inputs: Inputs) -> Tensor:
    """See :func:`packed_vittt_blocks`. It rounds where the kernels round."""
    y, weights, ints, floats = inputs
    if not y.numel():  # a convolution would see no token
        return y.clone()
    for block in weights:
        y = _define_block(y, block, ints, floats)
    return y


def _define_block(
    y: Tensor, weights: Tensor, ints: Sequence[int], floats: Sequence[float]
) -> Tensor:
    height, width, *numbers = ints
    s, dim = VitttBlockSizes(*numbers), y.shape[-1]
    p = BLOCK.split(weights, dim, s, y.dtype)
    rate, norm_eps, inner_eps, post_eps, mlp_norm_eps = floats
    dtype, inner = p["out_proj"].dtype, s.directions * dim
    reverse_heads = s.heads // 2 if s.directions == 2 else 0

    if s.kernel:
        weight = p["conv2d"].t().reshape(dim, 1, s.kernel, s.kernel)
        y = y + define("depthwise_conv2d", y, weight, height, width)
    x = F.layer_norm(y, (dim,), p["norm.weight"], p["norm.bias"], norm_eps)
    projected = multiply(x, p["views"], None, s.views * inner)
    k, *q, v = projected.to(dtype).to(y.dtype).split(inner, dim=-1)
    q = q[0] if q else k
    if s.taps:
        q, k = (
            define(
                "directional_conv1d",
                *(view, p[f"{conv}.weight"].unsqueeze(1), p[f"{conv}.bias"], inner - dim),
            )
            for view, conv in ((q, "conv_q"), (k, "conv_k"))
        )
    q, k, v = (view.unflatten(-1, (s.heads, inner // s.heads)) for view in (q, k, v))
    eta = rate * torch.sigmoid(multiply(x, p["rates"], p["rates.bias"], s.heads))
    z, *_ = define(
        "ttt_mlp" if s.is_mlp else "ttt_linear",
        *(q, k, v, eta, p["initial.w1"], p["initial.b1"]),
        *((p["initial.w2"], p["initial.b2"]) if s.is_mlp else ()),
        *(p["inner_weight"], p["inner_bias"]),
        p["scale"].repeat_interleave(s.heads // s.directions, dim=0),
        *(s.mini_batch_size, reverse_heads, inner_eps),
    )
    logits = multiply(x, p["gate"], None, dim) if s.gated else None
    z = z.flatten(2).to(dtype).to(y.dtype)
    merged = define("gated_norm", z, logits, p["post_weight"], p["post_bias"], post_eps)
    y = y + multiply(merged, p["out_proj"], None, dim)
    x = F.layer_norm(y, (dim,), p["mlp_norm.weight"], p["mlp_norm.bias"], mlp_norm_eps)
    projections = (multiply(x, p[part], None, s.hidden) for part in ("mlp_gate", "mlp_value"))
    activated = define("swiglu", torch.cat(tuple(projections), dim=-1))
    return y + multiply(activated, p["mlp_out"], None, dim)


def _flops(shapes: Inputs) -> int:
    """FLOPs of the blocks' products, convolutions and learners."""
    batch, length, dim = shapes.y
    s = VitttBlockSizes(*shapes.ints[2:])
    inner = s.directions * dim
    products = s.views * inner * dim + s.gated * dim * dim + s.kernel * s.kernel * dim
    products += s.heads * dim + dim * dim + 3 * s.hidden * dim + 2 * inner * s.taps
    d, op = inner // s.heads, TABLE["ttt_mlp" if s.is_mlp else "ttt_linear"]
    inputs = op.inputs(*[None] * op.width)._replace(
        q=[batch, length, s.heads, d], mini_batch_size=s.mini_batch_size
    )
    learner = op.flops(inputs._replace(w1=[s.heads, d, 4 * d]) if s.is_mlp else inputs)
    return math.prod(shapes.weights[:-1]) * (2 * batch * length * products + learner)


OP = Op(
    "packed_vittt_blocks",
    Inputs,
    BLOCK.contract("N words", ("ints", "floats")),
    packed_vittt_blocks_definition,
    {"cpu": Backend(lambda inputs: BLOCK.run(*inputs), None, BLOCK.refusal)},
    lambda inputs: inputs.y.new_empty(inputs.y.shape),
    schema="(Tensor y, Tensor weights, SymInt[] ints, float[] floats) -> Tensor",
    flops=_flops,
)


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
        weights: [N, words], of each of N ≥ 1 blocks its parameters from ``BLOCK.join``.
        sizes: of each block.
        grid: (h, w) with T = h · w. Without a Conv2d it is ignored.
        rate: η_base / d.
        eps: added to the variances of the norm, the inner norm, the post norms, the MLP's norm.

    Returns:
        [B, T, D].

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: the tensors and numbers do not fit such blocks.
    """
    return call(OP, Inputs(y, weights, (*grid, *sizes), (rate, *eps)))
