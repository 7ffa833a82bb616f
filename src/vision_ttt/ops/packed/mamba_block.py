"""The op ``vision_ttt::packed_mamba_block``: a whole block of Vim and Mamba-Reg, packed."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from ctypes import c_double, c_int64, c_void_p
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._contract import Real
from vision_ttt.ops._native import mirrors, no_vectors
from vision_ttt.ops._op import Backend, Op
from vision_ttt.ops._table import TABLE
from vision_ttt.ops.packed.block import FLAG, Block, define
from vision_ttt.ops.packed.linear import multiply
from vision_ttt.ops.packed.weights import PackedStructure, call

STATES = 16
"""N, the numbers of a channel's state, which the kernels hold in registers."""

_DIRECTIONS = ("forth", "back")


class MambaBlockSizes(NamedTuple):
    """The numbers that, with D, determine the shapes of a block's parameters."""

    inner: int  # E
    taps: int  # K
    rank: int  # R, even
    is_bfloat16: int  # 0 or 1: the packed weights are bfloat16


_OF_A_DIRECTION = {
    "conv": "taps inner",
    "conv_bias": "inner",
    "vectors": "packed vectors inner",  # to B and C
    "low": "packed rank inner",
    "steps": "packed inner rank",
    "steps.bias": "inner",
    "decay": f"{STATES} inner",  # A / ln 2
    "skip": "inner",
}
_PARAMETERS = {
    "norm": "dim",
    "in_proj": "packed columns dim",  # x, z
    **{
        f"{way}.{field}": _OF_A_DIRECTION[field] for field in _OF_A_DIRECTION for way in _DIRECTIONS
    },
    "out_proj": "packed dim inner",
}


@mirrors("MambaDirection")
class _MambaDirection(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("conv", "conv_bias")),
        *((name, PackedStructure) for name in ("vectors", "low", "steps")),
        *((name, c_void_p) for name in ("decay", "skip")),
    )


@mirrors("PackedMambaBlock")
class _PackedMambaBlock(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("y", "out", "scratch", "norm")),
        *((name, PackedStructure) for name in ("in_proj", "out_proj")),
        *((name, _MambaDirection) for name in _DIRECTIONS),
        *((name, c_int64) for name in ("batch", "length", "dim", "inner", "taps")),
        *((name, c_int64) for name in ("is_bfloat16", "threads")),
        ("eps", c_double),
    )


def _derive(s: Mapping[str, int]) -> dict[str, int]:
    if s["rank"] % 2:
        raise ValueError(f"packed_mamba_block: rank must be even, got {s['rank']}")
    return {"columns": 2 * s["inner"], "vectors": 2 * STATES}


BLOCK = Block(
    "packed_mamba_block",
    _PackedMambaBlock,
    _PARAMETERS,
    MambaBlockSizes,
    ranges={"is_bfloat16": FLAG},
    floats={"eps": Real(0)},
    derive=_derive,
    refusal=lambda s: no_vectors(s["dim"]) or no_vectors(s["inner"]),
    leading=(),
)


class Inputs(NamedTuple):
    """The op's arguments; ``ints`` are the sizes."""

    y: Tensor
    weights: Tensor
    ints: Sequence[int]
    eps: float


def packed_mamba_block_definition(inputs: Inputs) -> Tensor:
    """See :func:`packed_mamba_block`. It rounds where the kernels round."""
    y, weights, ints, eps = inputs
    if not y.numel():  # a convolution would see no token
        return y.clone()
    dim, (inner, _, rank, _) = y.shape[-1], ints
    p = BLOCK.split(weights, dim, ints, y.dtype)
    dtype = p["in_proj"].dtype

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(y.dtype)

    def direction(x: Tensor, way: str, reverse: int) -> Tensor:
        own = {field: p[f"{way}.{field}"] for field in _OF_A_DIRECTION}
        taps = own["conv"].t().unsqueeze(1)
        u = rounded(F.silu(define("directional_conv1d", x, taps, own["conv_bias"], reverse)))
        b, c = multiply(u, own["vectors"], None, 2 * STATES).split(STATES, dim=-1)
        r = rounded(multiply(u, own["low"], None, rank))
        logits = multiply(r, own["steps"], own["steps.bias"], inner)
        a = own["decay"].t() * math.log(2)
        scan = (u, logits, a, b, c, own["skip"], None, None, None, True, reverse)
        return rounded(define("selective_scan", *scan)[0])

    normed = F.rms_norm(y, (dim,), p["norm"], eps)
    x, z = rounded(multiply(normed, p["in_proj"], None, 2 * inner)).chunk(2, dim=-1)
    gated = 0.5 * (direction(x, "forth", 0) + direction(x, "back", inner)) * F.silu(z)
    return y + multiply(gated, p["out_proj"], None, dim)


def _flops(shapes: Inputs) -> int:
    """FLOPs of the block's products, convolutions and scans."""
    batch, length, dim = shapes.y
    s = MambaBlockSizes(*shapes.ints)
    weights = s.inner * (3 * dim + 2 * (s.taps + 2 * STATES + 2 * s.rank))
    op = TABLE["selective_scan"]
    inputs = op.inputs(*[None] * op.width)
    scan = op.flops(inputs._replace(u=[batch, length, 2 * s.inner], A=[2 * s.inner, STATES]))
    return 2 * batch * length * weights + scan


OP = Op(
    "packed_mamba_block",
    Inputs,
    BLOCK.contract("words", ("ints", "eps")),
    packed_mamba_block_definition,
    {"cpu": Backend(lambda x: BLOCK.run(*x[:3], (x.eps,)), None, BLOCK.refusal)},
    lambda inputs: inputs.y.new_empty(inputs.y.shape),
    schema="(Tensor y, Tensor weights, int[] ints, float eps) -> Tensor",
    flops=_flops,
)


def packed_mamba_block(y: Tensor, weights: Tensor, sizes: MambaBlockSizes, *, eps: float) -> Tensor:
    """One block of Vim (Algorithm 1) or Mamba-Reg, for inference on a CPU.

    Factors of products, x, z, u and either direction's sums are rounded to the packed weights'
    dtype. Norms, step sizes, decays, states and the tokens are float32. ::

        x, z   = Linear(RMSNorm(y))
        u      = SiLU(Conv1d(x)),  B, C, r = Linear(u),  δ = softplus(Linear(r))    per direction
        h      = exp(δ A) h + δ B u,  s = C · h + D_skip u                          per direction
        y      ← y + Linear(½ (s_forth + s_back) ⊙ SiLU(z))

    Args:
        y: tokens [B, T, D], float32. It is not modified.
        weights: the block's parameters, from ``BLOCK.join``.
        sizes: the block's sizes.
        eps: of the RMSNorm.

    Returns:
        [B, T, D].

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: the tensors and numbers do not fit one block.
    """
    return call(OP, Inputs(y, weights, tuple(sizes), eps))
