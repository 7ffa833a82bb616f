"""The op ``vision_ttt::packed_vit3_block``: a whole block of ViT³ with packed weights."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_double, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._contract import LARGEST_REAL, Real
from vision_ttt.ops._native import mirrors, no_vectors
from vision_ttt.ops._op import Backend, Op
from vision_ttt.ops.packed.block import FLAG, GRID, Block, Run, define
from vision_ttt.ops.packed.linear import linear
from vision_ttt.ops.packed.weights import NormStructure, PackedStructure, call
from vision_ttt.ops.vit3_ttt import depthwise, depthwise_step, gated_unit, gated_unit_step


class Vit3BlockSizes(NamedTuple):
    """The numbers that, with D, determine the shapes of a block's parameters."""

    heads: int  # H
    hidden: int  # of the MLP
    tanh_gelu: int  # 0 or 1: the MLP's GELU is the tanh approximation
    convolved: int  # 0 or 1: the MLP has a convolution
    modulated: int  # 0 or 1: a modulation of each call is in the place of the norms' parameters
    is_bfloat16: int  # 0 or 1: the packed weights are bfloat16


PARAMETERS = {
    "conv2d": "9 dim",
    "conv2d_bias": "dim",
    "norm1.weight": "dim if affine",
    "norm1.bias": "dim if affine",
    "norm2.weight": "dim if affine",
    "norm2.bias": "dim if affine",
    "qkv": "packed views dim",
    "qkv.bias": "views",
    "units": "heads d two_d",  # W₂ beside W₁
    "kernels": "9 d",
    "proj": "packed dim mixed",
    "proj.bias": "dim",
    "fc1": "packed hidden dim",
    "fc1.bias": "hidden",
    "fc2": "packed dim hidden",
    "fc2.bias": "dim",
    "mlp_conv": "9 hidden if convolved",
    "mlp_conv_bias": "hidden if convolved",
}


@mirrors("PackedVit3Block")
class Vit3BlockStructure(ctypes.Structure):
    """``PackedVit3Block`` of csrc/blocks/blocks.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("y", "out", "scratch", "conv2d", "conv2d_bias")),
        *((name, NormStructure) for name in ("norm1", "norm2")),
        *((name, c_void_p) for name in ("gate1", "gate2")),
        *((name, PackedStructure) for name in ("qkv", "proj", "fc1", "fc2")),
        *((name, c_void_p) for name in ("rotations", "units", "kernels")),
        *((name, c_void_p) for name in ("mlp_conv", "mlp_conv_bias", "sums", "all_sums")),
        *((name, c_int64) for name in ("batch", "length", "height", "width", "dim", "heads")),
        *((name, c_int64) for name in ("gate_stride", "tanh_gelu", "is_bfloat16", "threads")),
        *((name, c_int64) for name in ("above", "below", "total")),
        ("loss_scale", c_double),
    )


def derive(op: str, s: Mapping[str, int]) -> dict[str, int]:
    """Sizes of a block that determine shapes."""
    dim, heads = s["dim"], s["heads"]
    if dim % heads:
        raise ValueError(f"{op}: {dim} channels are not a multiple of {heads} heads")
    d = dim // heads
    derived = {"d": d, "two_d": 2 * d, "mixed": dim + d, "views": 3 * (dim + d)}
    return {**derived, "affine": 1 - s["modulated"], "gate_stride": 6 * dim}


def _check_call(values: Mapping[str, Any], s: Mapping[str, int]) -> None:
    length, (height, width, *_) = values["y"].shape[1], values["ints"]
    rotations = values["rotations"]
    if length != height * width:
        raise ValueError(f"packed_vit3_block: {length} tokens do not fill {height} x {width}")
    if rotations is not None and 2 * rotations.shape[1] != s["dim"]:
        wanted, got = [length, s["dim"] // 2, 2], list(rotations.shape)
        raise ValueError(f"packed_vit3_block: rotations must be {wanted}, got {got}")
    if (values["modulation"] is not None) != s["modulated"]:
        raise ValueError(
            "packed_vit3_block: a block with modulated=1, and no other, needs a modulation, got "
            f"modulated={s['modulated']}"
        )


def refuse(s: Mapping[str, int]) -> str | None:
    """The reason why the kernels do not support a block of these sizes, or None if they do."""
    return no_vectors(s["dim"]) or no_vectors(s["d"]) or no_vectors(s["hidden"])


RANGES = dict.fromkeys(("tanh_gelu", "convolved", "modulated", "is_bfloat16"), FLAG)
FLOATS = {"loss_scale": Real(-LARGEST_REAL), "norm1.eps": Real(0), "norm2.eps": Real(0)}

BLOCK = Block(
    "packed_vit3_block",
    Vit3BlockStructure,
    PARAMETERS,
    Vit3BlockSizes,
    ranges=RANGES,
    floats=FLOATS,
    derive=derive,
    refusal=refuse,
    leading=GRID,
    further=_check_call,
)


class Inputs(NamedTuple):
    """The op's arguments; ``ints`` are the grid and the sizes, ``floats`` those of BLOCK."""

    y: Tensor
    weights: Tensor
    modulation: Tensor | None
    rotations: Tensor | None
    ints: Sequence[int]
    floats: Sequence[float]


def packed_vit3_block_definition(inputs: Inputs) -> Tensor:
    """See :func:`packed_vit3_block`. It rounds where the kernels round."""
    y, weights, modulation, rotations, ints, floats = inputs
    if not y.numel():  # the inner convolution would see no channel
        return y.clone()
    p = BLOCK.split(weights, y.shape[-1], ints[BLOCK.first_size :], y.dtype)
    return compute(y, p, ints, floats, modulation=modulation, rotations=rotations)


def compute(
    y: Tensor,
    p: Mapping[str, Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    run: Run = define,
    modulation: Tensor | None = None,
    rotations: Tensor | None = None,
) -> Tensor:
    """The block with the parameters p of :meth:`Block.split`."""
    loss_scale, *eps = floats
    grid, s, dim = tuple(ints[:2]), Vit3BlockSizes(*ints[2:]), y.shape[-1]
    d, dtype = dim // s.heads, p["qkv"].dtype
    gelu = {"approximate": "tanh" if s.tanh_gelu else "none"}

    def convolve(x: Tensor, name: str) -> Tensor:
        weight = p[name].t().reshape(-1, 1, 3, 3)
        return x + run("depthwise_conv2d", x, weight, *grid) + p[f"{name}_bias"]

    def norm(x: Tensor, branch: int) -> Tensor:
        if modulation is None:
            own = (p[f"norm{branch + 1}.{part}"] for part in ("weight", "bias"))
            return F.layer_norm(x, (dim,), *own, eps[branch])
        shift, scale = modulation[:, 3 * branch, None], modulation[:, 3 * branch + 1, None]
        return F.layer_norm(x, (dim,), None, None, eps[branch]) * scale + shift

    def gate(x: Tensor, branch: int) -> Tensor:
        return x if modulation is None else modulation[:, 3 * branch + 2, None] * x

    y = convolve(y, "conv2d")
    views = linear(norm(y, 0), p, "qkv")
    q, k, v, q2, k2, v2 = views.split((dim, dim, dim, d, d, d), dim=-1)
    if rotations is not None:
        q, k = (_rotate(x, rotations) for x in (q, k))
    q, k, v = (view.unflatten(-1, (s.heads, d)) for view in (q.to(dtype).to(y.dtype), k, v))
    w2, w1 = p["units"].chunk(2, dim=-1)
    w1, w2 = gated_unit_step(k, v, w1, w2, loss_scale=loss_scale)
    w3 = p["kernels"].t().reshape(d, 1, 3, 3)
    w3 = depthwise_step(k2, v2, w3, grid, loss_scale=loss_scale)
    o = torch.cat((gated_unit(q, w1, w2).flatten(2), depthwise(q2, w3, grid)), dim=-1)
    y = y + gate(linear(o, p, "proj"), 0)
    h = F.gelu(linear(norm(y, 1), p, "fc1"), **gelu)
    if "mlp_conv" in p:
        h = F.gelu(convolve(h.to(dtype).to(y.dtype), "mlp_conv"), **gelu)
    return y + gate(linear(h, p, "fc2"), 1)


def _rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Turn each pair of channels by its cosine and sine in rotations [T, D / 2, 2]."""
    cos, sin = rotations.unbind(-1)
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)


def _forward(inputs: Inputs) -> Tensor:
    y, weights, modulation, rotations, ints, floats = inputs
    others: dict[str, Any] = {}
    if rotations is not None:
        rotations = rotations.contiguous()
        others["rotations"] = rotations.data_ptr()
    if modulation is not None:
        modulation = modulation.contiguous()
        first, step = modulation.data_ptr(), modulation.itemsize * y.shape[-1]
        for branch, at in (("1", first), ("2", first + 3 * step)):
            eps = floats[int(branch)]
            others[f"norm{branch}"] = NormStructure(at + step, at, modulation.stride(0), eps)
            others[f"gate{branch}"] = at + 2 * step
    return BLOCK.run(y, weights, ints, floats, **others)


def _flops(shapes: Inputs) -> int:
    """FLOPs of the block's products, convolutions and inner models."""
    (batch, length, dim), s = shapes.y, Vit3BlockSizes(*shapes.ints[2:])
    d = dim // s.heads
    products = (3 * (dim + d) + dim + d + 2 * s.hidden) * dim
    inner = 3 * 2 * dim * d  # the gated units: outputs on k, gradients, outputs on q
    convolutions = 9 * (dim + 2 * d + s.convolved * s.hidden)
    return 2 * batch * length * (products + inner + convolutions)


OP = Op(
    "packed_vit3_block",
    Inputs,
    BLOCK.contract("words", ("ints", "floats"), modulation="? B 6 dim", rotations="? T pairs 2"),
    packed_vit3_block_definition,
    {"cpu": Backend(_forward, None, BLOCK.refusal)},
    lambda inputs: inputs.y.new_empty(inputs.y.shape),
    schema="(Tensor y, Tensor weights, Tensor? modulation, Tensor? rotations, "
    "SymInt[] ints, float[] floats) -> Tensor",
    flops=_flops,
)


def packed_vit3_block(
    y: Tensor,
    weights: Tensor,
    sizes: Vit3BlockSizes,
    *,
    grid: tuple[int, int],
    loss_scale: float,
    eps: tuple[float, float],
    modulation: Tensor | None = None,
    rotations: Tensor | None = None,
) -> Tensor:
    """One block of ViT³, H-ViT³ or DiT³, for inference on a CPU.

    Factors of products are rounded to the packed weights' dtype. Sums, norms, the inner models'
    steps and the tokens are float32.

    Args:
        y: tokens [B, T, D], float32. It is not modified.
        weights: the block's parameters, from ``BLOCK.join``.
        sizes: the block's sizes.
        grid: (h, w) with T = h · w.
        loss_scale: c, see :func:`vision_ttt.ops.vit3_ttt.gated_unit_step`.
        eps: added to the variances of the two norms.
        modulation: [B, 6, D], shift, scale and gate of either branch, for modulated blocks only.
        rotations: [T, D / 2, 2], or None.

    Returns:
        [B, T, D].

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: the tensors and numbers do not fit one block.
    """
    numbers = (*grid, *sizes), (loss_scale, *eps)
    return call(OP, Inputs(y, weights, modulation, rotations, *numbers))
