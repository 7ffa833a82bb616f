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
from vision_ttt.ops._learner_cpu import _Convolution, _State, unsuited
from vision_ttt.ops._native import mirrors, no_vectors
from vision_ttt.ops._op import Backend, Op
from vision_ttt.ops.packed.block import FLAG, GRID, Block, Run, define, flops_of
from vision_ttt.ops.packed.linear import multiply
from vision_ttt.ops.packed.weights import NormStructure, PackedStructure, call

INNER = ("w1", "b1", "w2", "b2")
"""The tensors of the inner model, of which TTT-Linear has two."""


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


PARAMETERS = {
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
    "scale": "scans mini_batch_size",
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
class VitttBlockStructure(ctypes.Structure):
    """``PackedVitttBlock`` of csrc/blocks/blocks.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("y", "out", "between", "scratch", "conv2d")),
        *((name, NormStructure) for name in ("norm", "mlp_norm")),
        *((name, PackedStructure) for name in ("views", "gate", "rates", "out_proj")),
        *((name, PackedStructure) for name in ("mlp_gate", "mlp_value", "mlp_out")),
        *((name, _Convolution) for name in ("conv_q", "conv_k")),
        ("initial", _State),
        *((name, c_void_p) for name in ("inner_weight", "inner_bias", "scale")),
        *((name, c_void_p) for name in ("post_weight", "post_bias")),
        *((name, c_void_p) for name in ("state", "next_state", "side")),
        *((name, c_int64) for name in ("batch", "length", "height", "width", "dim", "heads")),
        *((name, c_int64) for name in ("directions", "kernel", "taps", "shared_qk", "is_mlp")),
        *((name, c_int64) for name in ("mini_batch_size", "is_bfloat16", "threads", "count")),
        *((name, c_int64) for name in ("above", "below", "open", "reverse", "merges")),
        *((name, c_float) for name in ("inner_eps", "post_eps", "rate")),
    )


def derive(op: str, s: Mapping[str, int], scans: int | None = None) -> dict[str, int]:
    """Sizes of a block that scans in ``scans`` of its directions; None for all of them."""
    scans = s["directions"] if scans is None else scans
    inner, heads, kernel = scans * s["dim"], s["heads"], s["kernel"]
    if kernel and kernel % 2 == 0:
        raise ValueError(f"{op}: conv2d's kernel must be odd, got {kernel}")
    if inner % heads or heads % scans:
        raise ValueError(f"{op}: {heads} heads in {scans} directions of {s['dim']}")
    d = inner // heads
    return {
        "kernel_area": kernel * kernel,
        "scans": scans,
        "inner": inner,
        "columns": s["views"] * inner,
        "d": d,
        "wide": 4 * d if s["is_mlp"] else d,
        "shared_qk": int(s["views"] == 2),
    }


def refuse(s: Mapping[str, int]) -> str | None:
    """The reason why the kernels do not support a block of these sizes, or None if they do."""
    reason = unsuited(s["d"], s["mini_batch_size"])
    return reason or no_vectors(s["dim"]) or no_vectors(s["hidden"])


def _check_grid(values: Mapping[str, Any], s: Mapping[str, int]) -> None:
    height, width, *_ = values["ints"]
    if s["kernel"] and values["y"].shape[1] != height * width:
        raise ValueError(
            f"packed_vittt_blocks: {values['y'].shape[1]} tokens do not fill {height} x {width}"
        )


RANGES = {
    **dict.fromkeys(("taps", "kernel"), Whole(0)),
    **{"directions": Whole(1, 2), "views": Whole(2, 3)},
    **dict.fromkeys(("gated", "is_mlp", "is_bfloat16"), FLAG),
}
FLOATS = dict.fromkeys(("rate", "norm.eps", "inner_eps", "post_eps", "mlp_norm.eps"), Real(0))

BLOCK = Block(
    "packed_vittt_blocks",
    VitttBlockStructure,
    PARAMETERS,
    VitttBlockSizes,
    ranges=RANGES,
    floats=FLOATS,
    derive=derive,
    refusal=refuse,
    leading=GRID,
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
    sizes = ints[BLOCK.first_size :]
    for words in weights:
        y = compute(y, BLOCK.split(words, y.shape[-1], sizes, y.dtype), ints, floats)
    return y


def compute(
    y: Tensor,
    p: Mapping[str, Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    run: Run = define,
) -> Tensor:
    """One block with the parameters p of :meth:`Block.split`."""
    height, width, *numbers = ints
    s = VitttBlockSizes(*numbers)
    y = convolve(y, p, s.kernel, height, width, run)
    views, logits = project(y, p, s, s.directions, floats)
    reverse_heads = s.heads // 2 if s.directions == 2 else 0
    state = [p[f"initial.{name}"] for name in INNER[: 4 if s.is_mlp else 2]]
    qkv = inner_views(views, p, s, reverse_heads, run)
    z, *_ = learn(qkv, logits, state, p, s, reverse_heads, floats, run)
    return answer(y, z.to(p["views"].dtype).to(y.dtype), p, s, floats, run)


def convolve(
    y: Tensor, p: Mapping[str, Tensor], kernel: int, height: int, width: int, run: Run = define
) -> Tensor:
    """y + DWConv(y), or y of a block without the Conv2d."""
    if not kernel:
        return y
    weight = p["conv2d"].t().reshape(y.shape[-1], 1, kernel, kernel)
    return y + run("depthwise_conv2d", y, weight, height, width)


def project(
    y: Tensor, p: Mapping[str, Tensor], s: Any, scans: int, floats: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """The views k, q (unless it is k) and v side by side, and the rates' logits."""
    x = _norm(y, p, "norm", floats[1])
    views = multiply(x, p["views"], None, s.views * scans * y.shape[-1])
    logits = multiply(x, p["rates"], p["rates.bias"], len(p["rates.bias"]))
    return views.to(p["views"].dtype).to(y.dtype), logits


def inner_views(
    views: Tensor, p: Mapping[str, Tensor], s: Any, reverse_heads: int, run: Run = define
) -> list[Tensor]:
    """The learners' q, k and v [B, T, H, d]: the views after their convolutions."""
    inner = views.shape[-1] // s.views
    k, *q, v = views.split(inner, dim=-1)
    q = q[0] if q else k
    if s.taps:
        reverse_channels = inner // s.heads * reverse_heads
        q, k = (
            run(
                "directional_conv1d",
                *(view, p[f"{conv}.weight"].unsqueeze(1), p[f"{conv}.bias"], reverse_channels),
            )
            for view, conv in ((q, "conv_q"), (k, "conv_k"))
        )
    return [view.unflatten(-1, (s.heads, inner // s.heads)) for view in (q, k, v)]


def learn(
    qkv: Sequence[Tensor],
    logits: Tensor,
    state: Sequence[Tensor],
    p: Mapping[str, Tensor],
    s: Any,
    reverse_heads: int,
    floats: Sequence[float],
    run: Run = define,
) -> list[Tensor]:
    """The learners' outputs z [B, T, H d] and their models behind the tokens."""
    z, *after = run(
        "ttt_mlp" if s.is_mlp else "ttt_linear",
        *(*qkv, floats[0] * torch.sigmoid(logits), *state),
        *(p["inner_weight"], p["inner_bias"]),
        p["scale"].repeat_interleave(s.heads // len(p["scale"]), dim=0),
        *(s.mini_batch_size, reverse_heads, floats[2]),
    )
    return [z.flatten(2), *after]


def answer(
    y: Tensor,
    z: Tensor,
    p: Mapping[str, Tensor],
    s: Any,
    floats: Sequence[float],
    run: Run = define,
) -> Tensor:
    """Compute the block's tokens from the learners' outputs z [B, T, R D] of all directions."""
    _, norm_eps, _, post_eps, mlp_norm_eps = floats
    dim, gate = y.shape[-1], None
    if "gate" in p:
        gate = multiply(_norm(y, p, "norm", norm_eps), p["gate"], None, dim)
    merged = run("gated_norm", z, gate, p["post_weight"], p["post_bias"], post_eps)
    y = y + multiply(merged, p["out_proj"], None, dim)
    x = _norm(y, p, "mlp_norm", mlp_norm_eps)
    projections = (multiply(x, p[part], None, s.hidden) for part in ("mlp_gate", "mlp_value"))
    activated = run("swiglu", torch.cat(tuple(projections), dim=-1))
    return y + multiply(activated, p["mlp_out"], None, dim)


def _norm(y: Tensor, p: Mapping[str, Tensor], name: str, eps: float) -> Tensor:
    return F.layer_norm(y, y.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], eps)


def _flops(shapes: Inputs) -> int:
    """FLOPs of the blocks' products, convolutions and learners."""
    batch, length, dim = shapes.y
    s = VitttBlockSizes(*shapes.ints[2:])
    inner = s.directions * dim
    products = s.views * inner * dim + s.gated * dim * dim + s.kernel * s.kernel * dim
    products += s.heads * dim + dim * dim + 3 * s.hidden * dim + 2 * inner * s.taps
    learner = learner_flops([batch, length, s.heads, inner // s.heads], s)
    return math.prod(shapes.weights[:-1]) * (2 * batch * length * products + learner)


def learner_flops(q: list[int], s: Any) -> int:
    """FLOPs of the learners, given the shape [B, T, H, d] of their views."""
    *_, heads, d = q
    shapes = {"q": q, "mini_batch_size": s.mini_batch_size}
    if s.is_mlp:
        return flops_of("ttt_mlp", **shapes, w1=[heads, d, 4 * d])
    return flops_of("ttt_linear", **shapes)


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
        weights: [N, words], the parameters of N ≥ 1 blocks, each from ``BLOCK.join``.
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
