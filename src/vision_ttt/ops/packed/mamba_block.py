"""The op ``vision_ttt::packed_mamba_block``: a whole block of Vim and Mamba-Reg, packed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vision_ttt.ops._contract import check_storages
from vision_ttt.ops._dispatcher_bypass import may_bypass_dispatcher
from vision_ttt.ops._native import mirrors
from vision_ttt.ops._table import TABLE
from vision_ttt.ops.packed.launch import launch
from vision_ttt.ops.packed.mamba_block_weights import (
    STATES,
    MambaBlockParameters,
    MambaBlockSizes,
    layout,
)
from vision_ttt.ops.packed.parameter_vector import WORD
from vision_ttt.ops.packed.weights import PackedStructure, blocks_have_terms, resolve_negative

_INTS = MambaBlockSizes._fields


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
        weights: the block's parameters, from :func:`join_parameters`.
        sizes: the block's sizes.
        eps: of the RMSNorm.

    Returns:
        [B, T, D].

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: the tensors and numbers do not fit one block, the kernels do not support its
            sizes, or the kernels are missing.
    """
    if may_bypass_dispatcher((y, weights)):
        return _packed_mamba_block(y, weights, sizes, eps)
    return torch.ops.vision_ttt.packed_mamba_block(y, weights, list(sizes), eps)


torch.library.define(
    "vision_ttt::packed_mamba_block", "(Tensor y, Tensor weights, int[] ints, float eps) -> Tensor"
)


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
        *((name, _MambaDirection) for name in ("forth", "back")),
        *((name, c_int64) for name in ("batch", "length", "dim", "inner", "taps")),
        *((name, c_int64) for name in ("is_bfloat16", "threads")),
        ("eps", c_double),
    )


@functools.lru_cache(maxsize=256)
def _check(y: torch.Size, words: torch.Size, ints: tuple[int, ...], eps: float) -> None:
    """Raise an error unless these shapes of tokens and weights and these numbers fit one block."""
    if len(ints) != len(_INTS):
        raise ValueError(f"packed_mamba_block: needs {_INTS}, got {ints}")
    if not eps >= 0:  # NaN, too
        raise ValueError(f"packed_mamba_block: eps must be at least 0, got {eps}")
    if len(y) != 3:
        raise ValueError(f"packed_mamba_block: y must be [B, T, D], got {list(y)}")
    sizes = MambaBlockSizes(*ints)
    wanted = layout(y[2], sizes)[-1].end
    if words != (wanted,):
        raise ValueError(
            f"packed_mamba_block: weights must be [{wanted}] for {y[2]} channels and {sizes}, got "
            f"{list(words)}"
        )


@functools.lru_cache(maxsize=256)
def _describe(y: torch.Size, weights: int, ints: tuple[int, ...], eps: float) -> _PackedMambaBlock:
    """Describe a call whose weights begin at the address ``weights``.

    The description holds addresses only; the caller must keep the weights alive.
    """
    batch, length, dim = y
    s = MambaBlockSizes(*ints)
    p = MambaBlockParameters(*(weights + WORD.itemsize * x.start for x in layout(dim, s)))
    floats = torch.float32.itemsize * s.inner  # bytes of a number per channel
    in_terms = blocks_have_terms(torch.bfloat16 if s.is_bfloat16 else torch.float32)

    def direction(index: int, vectors: int, low: int, steps: int) -> _MambaDirection:
        return _MambaDirection(
            *(p.conv + index * s.taps * floats, p.conv_bias + index * floats),
            PackedStructure(vectors, None, s.inner, 2 * STATES, in_terms),
            PackedStructure(low, None, s.inner, s.rank, in_terms),
            PackedStructure(steps, p.steps_bias + index * floats, s.rank, s.inner, in_terms),
            *(p.decay + index * STATES * floats, p.skip + index * floats),
        )

    return _PackedMambaBlock(
        *(None, None, None, p.norm),
        PackedStructure(p.in_proj, None, dim, 2 * s.inner, in_terms),
        PackedStructure(p.out_proj, None, s.inner, dim, in_terms),
        direction(0, p.vectors_forth, p.low_forth, p.steps_forth),
        direction(1, p.vectors_back, p.low_back, p.steps_back),
        *(batch, length, dim, s.inner, s.taps, s.is_bfloat16, 0, eps),
    )


def _packed_mamba_block(y: Tensor, weights: Tensor, ints: Sequence[int], eps: float) -> Tensor:
    for name, tensor in (("y", y), ("weights", weights)):
        if not isinstance(tensor, Tensor):  # PyTorch passes None for a tensor without complaint
            raise TypeError(f"packed_mamba_block: {name} must be a tensor, got {tensor!r}")
    if y.dtype != torch.float32 or weights.dtype != WORD:
        raise TypeError(
            f"packed_mamba_block: y must be float32 and weights {WORD}, got {y.dtype}, "
            f"{weights.dtype}"
        )
    ints = tuple(ints)
    _check(y.shape, weights.shape, ints, eps)
    if any(not x.is_cpu or x.layout != torch.strided for x in (y, weights)):
        got = sorted({f"{x.layout} on {x.device}" for x in (y, weights)})
        raise ValueError(f"packed_mamba_block: tensors must be dense and on a CPU, got {got}")
    check_storages("packed_mamba_block", {"y": y, "weights": weights})
    if not y.numel():
        return y.new_empty(y.shape)
    y, weights = (resolve_negative(x).contiguous() for x in (y, weights))
    # A copy, because the description is cached and launch writes to it.
    problem = _PackedMambaBlock.from_buffer_copy(_describe(y.shape, weights.data_ptr(), ints, eps))
    return launch("vision_ttt_packed_mamba_block", problem, y)


torch.library.impl("vision_ttt::packed_mamba_block", "CPU", _packed_mamba_block)


@torch.library.register_fake("vision_ttt::packed_mamba_block")
def _(y: Tensor, *_: object) -> Tensor:
    return y.new_empty(y.shape)


@register_flop_formula(torch.ops.vision_ttt.packed_mamba_block)
def packed_mamba_block_flops(
    y: Sequence[int], _weights: object, ints: Sequence[int], *_: object, **__: object
) -> int:
    """FLOPs of the block's products, convolutions and scans."""
    batch, length, dim = y
    s = MambaBlockSizes(*ints)
    weights = s.inner * (3 * dim + 2 * (s.taps + 2 * STATES + 2 * s.rank))
    op = TABLE["selective_scan"]
    inputs = op.inputs(*[None] * len(op.inputs._fields))
    scan = op.flops(inputs._replace(u=[batch, length, 2 * s.inner], A=[2 * s.inner, STATES]))
    return 2 * batch * length * weights + scan
