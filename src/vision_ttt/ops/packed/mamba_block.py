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
from vision_ttt.ops.packed.block import FLAG, Block, Run, define, flops_of
from vision_ttt.ops.packed.linear import multiply
from vision_ttt.ops.packed.weights import PackedStructure, call

STATES = 16
"""N, the numbers of a channel's state, which the kernels hold in registers."""

DIRECTIONS = ("forth", "back")


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
PARAMETERS = {
    "norm": "dim",
    "in_proj": "packed columns dim",  # x, z
    **{f"{way}.{field}": _OF_A_DIRECTION[field] for field in _OF_A_DIRECTION for way in DIRECTIONS},
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
class MambaBlockStructure(ctypes.Structure):
    """``PackedMambaBlock`` of csrc/blocks/blocks.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("y", "out", "scratch", "norm")),
        *((name, PackedStructure) for name in ("in_proj", "out_proj")),
        *((name, _MambaDirection) for name in DIRECTIONS),
        *((name, c_void_p) for name in ("state", "next_state", "side")),
        *((name, c_int64) for name in ("batch", "length", "dim", "inner", "taps")),
        *((name, c_int64) for name in ("is_bfloat16", "threads", "reverse", "merges")),
        ("eps", c_double),
    )


def derive(op: str, s: Mapping[str, int]) -> dict[str, int]:
    """Sizes of a block that determine shapes."""
    if s["rank"] % 2:
        raise ValueError(f"{op}: rank must be even, got {s['rank']}")
    return {"columns": 2 * s["inner"], "vectors": 2 * STATES}


def refuse(s: Mapping[str, int]) -> str | None:
    """The reason why the kernels do not support a block of these sizes, or None if they do."""
    return no_vectors(s["dim"]) or no_vectors(s["inner"])


BLOCK = Block(
    "packed_mamba_block",
    MambaBlockStructure,
    PARAMETERS,
    MambaBlockSizes,
    ranges={"is_bfloat16": FLAG},
    floats={"eps": Real(0)},
    derive=derive,
    refusal=refuse,
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
    return compute(y, BLOCK.split(weights, y.shape[-1], ints, y.dtype), ints, (eps,))


def compute(
    y: Tensor,
    p: Mapping[str, Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    run: Run = define,
) -> Tensor:
    """The block with the parameters p of :meth:`Block.split`."""
    s, (eps,) = MambaBlockSizes(*ints), floats
    x, z = project(y, p, s, eps).chunk(2, dim=-1)
    forth, back = (
        scan(convolve(x, p, s, reverse, run), p, s, reverse, run=run)[0] for reverse in range(2)
    )
    return answer(y, forth + back, z, p)


def project(y: Tensor, p: Mapping[str, Tensor], s: MambaBlockSizes, eps: float) -> Tensor:
    """x and z side by side."""
    x = multiply(F.rms_norm(y, y.shape[-1:], p["norm"], eps), p["in_proj"], None, 2 * s.inner)
    return _rounded(x, p)


def convolve(
    x: Tensor, p: Mapping[str, Tensor], s: MambaBlockSizes, reverse: int, run: Run = define
) -> Tensor:
    """u of one direction."""
    way = DIRECTIONS[reverse]
    taps, bias = p[f"{way}.conv"].t().unsqueeze(1), p[f"{way}.conv_bias"]
    return _rounded(F.silu(run("directional_conv1d", x, taps, bias, reverse * s.inner)), p)


def scan(
    u: Tensor,
    p: Mapping[str, Tensor],
    s: MambaBlockSizes,
    reverse: int,
    state: Tensor | None = None,
    run: Run = define,
) -> tuple[Tensor, Tensor]:
    """The sums of one direction, and its state [B, E, N] behind the tokens."""
    own = {field: p[f"{DIRECTIONS[reverse]}.{field}"] for field in _OF_A_DIRECTION}
    b, c = multiply(u, own["vectors"], None, 2 * STATES).split(STATES, dim=-1)
    r = _rounded(multiply(u, own["low"], None, s.rank), p)
    logits = multiply(r, own["steps"], own["steps.bias"], s.inner)
    a = own["decay"].t() * math.log(2)
    scanned = (u, logits, a, b, c, own["skip"], None, None, state, True, reverse * s.inner)
    y, after = run("selective_scan", *scanned)
    return _rounded(y, p), after


def answer(y: Tensor, sums: Tensor, z: Tensor, p: Mapping[str, Tensor]) -> Tensor:
    """Compute the block's tokens from both directions' sums."""
    return y + multiply(0.5 * sums * F.silu(z), p["out_proj"], None, y.shape[-1])


def _rounded(x: Tensor, p: Mapping[str, Tensor]) -> Tensor:
    return x.to(p["in_proj"].dtype).to(x.dtype)


def _flops(shapes: Inputs) -> int:
    """FLOPs of the block's products, convolutions and scans."""
    batch, length, dim = shapes.y
    s = MambaBlockSizes(*shapes.ints)
    weights = s.inner * (3 * dim + 2 * (s.taps + 2 * STATES + 2 * s.rank))
    scan = flops_of("selective_scan", u=[batch, length, 2 * s.inner], A=[2 * s.inner, STATES])
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
