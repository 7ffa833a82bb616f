"""The op ``vision_ttt::packed_swiglu_ttt_block``: a block of a ViT made linear, weights packed."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_double, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._contract import Real
from vision_ttt.ops._native import mirrors, pointer
from vision_ttt.ops._op import Backend, Op
from vision_ttt.ops.packed.block import FLAG, GRID, Block, define
from vision_ttt.ops.packed.linear import linear
from vision_ttt.ops.packed.vit3_block import refuse
from vision_ttt.ops.packed.weights import NormStructure, PackedStructure, call


class SwigluTttBlockSizes(NamedTuple):
    """The numbers that, with D, determine the shapes of a block's parameters."""

    heads: int  # H
    hidden: int  # of the MLP
    scaled: int  # 0 or 1: a scale for each channel of both branches (LayerScale)
    rotate_half: int  # 0 or 1: rotations pair channel i with i + d / 2, not neighbours
    tanh_gelu: int  # 0 or 1: the MLP's GELU is the tanh approximation
    is_bfloat16: int  # 0 or 1: the packed weights are bfloat16


PARAMETERS = {
    "norm1.weight": "dim",
    "norm1.bias": "dim",
    "norm2.weight": "dim",
    "norm2.bias": "dim",
    "gate1": "dim if scaled",
    "gate2": "dim if scaled",
    "qkv": "packed views dim",
    "qkv.bias": "views",
    "q_conv": "9 dim",
    "q_conv_bias": "dim",
    "k_conv": "9 dim",
    "k_conv_bias": "dim",
    "units": "heads d two_d",  # W₁ beside W₂
    "out_units": "heads d d",  # W₃
    "proj": "packed dim dim",
    "proj.bias": "dim",
    "fc1": "packed hidden dim",
    "fc1.bias": "hidden",
    "fc2": "packed dim hidden",
    "fc2.bias": "dim",
}


@mirrors("PackedSwigluTttBlock")
class SwigluTttBlockStructure(ctypes.Structure):
    """``PackedSwigluTttBlock`` of csrc/blocks/blocks.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("y", "out", "scratch")),
        *((name, NormStructure) for name in ("norm1", "norm2")),
        *((name, c_void_p) for name in ("gate1", "gate2")),
        *((name, PackedStructure) for name in ("qkv", "proj", "fc1", "fc2")),
        *((name, c_void_p) for name in ("rotations", "q_conv", "q_conv_bias", "k_conv")),
        *((name, c_void_p) for name in ("k_conv_bias", "units", "out_units")),
        *((name, c_int64) for name in ("batch", "length", "height", "width", "dim", "heads")),
        *((name, c_int64) for name in ("rotate_half", "tanh_gelu", "is_bfloat16", "threads")),
        *((name, c_double) for name in ("key_eps",)),
    )


def _derive(op: str, s: Mapping[str, int]) -> dict[str, int]:
    dim, heads = s["dim"], s["heads"]
    if dim % heads:
        raise ValueError(f"{op}: {dim} channels are not a multiple of {heads} heads")
    d = dim // heads
    return {"d": d, "two_d": 2 * d, "views": 3 * dim}


def _check_call(values: Mapping[str, Any], s: Mapping[str, int]) -> None:
    length, (height, width, *_) = values["y"].shape[1], values["ints"]
    if length < height * width:
        raise ValueError(
            f"packed_swiglu_ttt_block: {length} tokens are fewer than those of {height} x {width}"
        )
    rotations = values["rotations"]
    wanted = [height * width, 2 * s["d"]]
    if rotations is not None and list(rotations.shape) != wanted:
        raise ValueError(
            f"packed_swiglu_ttt_block: rotations must be {wanted}, got {list(rotations.shape)}"
        )


BLOCK = Block(
    "packed_swiglu_ttt_block",
    SwigluTttBlockStructure,
    PARAMETERS,
    SwigluTttBlockSizes,
    ranges=dict.fromkeys(("scaled", "rotate_half", "tanh_gelu", "is_bfloat16"), FLAG),
    floats={
        "key_eps": Real(0),
        "norm1.eps": Real(0),
        "norm2.eps": Real(0),
    },
    derive=_derive,
    refusal=refuse,
    leading=GRID,
    further=_check_call,
)


class Inputs(NamedTuple):
    """The op's arguments; ``ints`` are the grid and the sizes, ``floats`` those of BLOCK."""

    y: Tensor
    weights: Tensor
    rotations: Tensor | None
    ints: Sequence[int]
    floats: Sequence[float]


def packed_swiglu_ttt_block_definition(inputs: Inputs) -> Tensor:
    """See :func:`packed_swiglu_ttt_block`. It rounds where the kernels round."""
    y, weights, rotations, ints, floats = inputs
    if not y.numel():  # the convolutions would see no channel
        return y.clone()
    (height, width), s, dim = ints[:2], SwigluTttBlockSizes(*ints[2:]), y.shape[-1]
    key_eps, *eps = floats
    p = BLOCK.split(weights, dim, s, y.dtype)
    prefix = y.shape[1] - height * width
    heads = (s.heads, dim // s.heads)

    def norm(x: Tensor, branch: int) -> Tensor:
        own = (p[f"norm{branch}.{part}"] for part in ("weight", "bias"))
        return F.layer_norm(x, (dim,), *own, eps[branch - 1])

    def gate(x: Tensor, branch: int) -> Tensor:
        return x * p[f"gate{branch}"] if s.scaled else x

    def rotate(x: Tensor) -> Tensor:
        """Rotate the heads of the grid's tokens, and keep those of the other tokens."""
        if rotations is None:
            return x
        others, x = x.unflatten(-1, heads).tensor_split([prefix], dim=1)
        sines, cosines = rotations.unsqueeze(1).chunk(2, dim=-1)  # [h w, 1, d]
        if s.rotate_half:
            first, second = x.chunk(2, dim=-1)
            turned = torch.cat((-second, first), dim=-1)
        else:
            first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
            turned = torch.stack((-second, first), dim=-1).flatten(-2)
        return torch.cat((others, x * cosines + turned * sines), dim=1).flatten(2)

    def convolve(x: Tensor, name: str) -> Tensor:
        others, x = x.tensor_split([prefix], dim=1)
        weight = p[name].t().reshape(-1, 1, 3, 3)
        out = x + define("depthwise_conv2d", x, weight, height, width) + p[f"{name}_bias"]
        return torch.cat((others, out), dim=1)

    q, k, v = linear(norm(y, 1), p, "qkv").chunk(3, dim=-1)
    q, k = rotate(q), rotate(k)
    centred = k - k.mean(1, keepdim=True)
    k = centred * (centred.square().mean(1, keepdim=True) + key_eps).rsqrt()
    views = (x.unflatten(-1, heads) for x in (convolve(q, "q_conv"), convolve(k, "k_conv"), v))
    o = define("swiglu_ttt", *views, *p["units"].chunk(2, dim=-1), p["out_units"])
    y = y + gate(linear(o.flatten(2), p, "proj"), 1)
    hidden = F.gelu(linear(norm(y, 2), p, "fc1"), approximate="tanh" if s.tanh_gelu else "none")
    return y + gate(linear(hidden, p, "fc2"), 2)


def _forward(inputs: Inputs) -> Tensor:
    y, weights, rotations, ints, floats = inputs
    rotations = None if rotations is None else rotations.contiguous()
    return BLOCK.run(y, weights, ints, floats, rotations=pointer(rotations))


def _flops(shapes: Inputs) -> int:
    """FLOPs of the block's products, convolutions and inner models."""
    (batch, length, dim), s = shapes.y, SwigluTttBlockSizes(*shapes.ints[2:])
    products = (4 * dim + 2 * s.hidden) * dim
    inner = 9 * dim * (dim // s.heads)  # outputs on k, gradients, outputs on q
    height, width = shapes.ints[:2]
    return 2 * batch * (length * (products + inner) + height * width * 2 * 9 * dim)


OP = Op(
    "packed_swiglu_ttt_block",
    Inputs,
    BLOCK.contract("words", ("ints", "floats"), rotations="? places two_d"),
    packed_swiglu_ttt_block_definition,
    {"cpu": Backend(_forward, None, BLOCK.refusal)},
    lambda inputs: inputs.y.new_empty(inputs.y.shape),
    schema="(Tensor y, Tensor weights, Tensor? rotations, SymInt[] ints, float[] floats) -> Tensor",
    flops=_flops,
)


def packed_swiglu_ttt_block(
    y: Tensor,
    weights: Tensor,
    sizes: SwigluTttBlockSizes,
    *,
    grid: tuple[int, int],
    key_eps: float,
    eps: tuple[float, float],
    rotations: Tensor | None = None,
) -> Tensor:
    """One block of a ViT made linear with SwiGLU inner models, for inference on a CPU.

    Factors of products are rounded to the packed weights' dtype. Sums, norms, the inner models and
    the tokens are float32.

    Args:
        y: tokens [B, T, D], float32; the last h · w are those of the grid. It is not modified.
        weights: the block's parameters, from ``BLOCK.join``.
        sizes: the block's sizes.
        grid: (h, w).
        key_eps: added to the variance of the keys.
        eps: added to the variances of the two norms.
        rotations: [h · w, 2 d], sines and cosines for each channel of a head, or None.

    Returns:
        [B, T, D].

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: the tensors and numbers do not fit one block.
    """
    return call(OP, Inputs(y, weights, rotations, (*grid, *sizes), (key_eps, *eps)))
