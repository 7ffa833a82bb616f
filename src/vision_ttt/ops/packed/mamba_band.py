"""The op ``vision_ttt::packed_mamba_band``: tokens of a sequence through one scan of a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops._contract import Real
from vision_ttt.ops._op import Backend, Op
from vision_ttt.ops.packed.block import FLAG, Block, Run, define, flops_of, run_op
from vision_ttt.ops.packed.mamba_block import (
    PARAMETERS,
    STATES,
    MambaBlockSizes,
    MambaBlockStructure,
    answer,
    convolve,
    derive,
    project,
    refuse,
    scan,
)
from vision_ttt.ops.packed.weights import call


def state_numbers(sizes: MambaBlockSizes) -> int:
    """S, the numbers of a state, which are 0 before the first token."""
    return (STATES + sizes.taps - 1) * sizes.inner


def _check_call(values: Mapping[str, Any], s: Mapping[str, int]) -> None:
    op, y, side = "packed_mamba_band", values["y"], values["side"]
    if y.shape[0] != 1 or not y.shape[1]:
        raise ValueError(f"{op}: y must be [1, T, {s['dim']}] of T > 0 tokens, got {list(y.shape)}")
    numbers = (STATES + s["taps"] - 1) * s["inner"]
    if len(values["state"]) != numbers:
        raise ValueError(f"{op}: state must have {numbers} numbers, got {len(values['state'])}")
    if (side is not None) != values["ints"][1]:
        raise ValueError(f"{op}: side must be given with merges=1, and only then")
    dtype = torch.bfloat16 if s["is_bfloat16"] else torch.float32
    shape = [1, y.shape[1], s["inner"]]
    if side is not None and (list(side.shape) != shape or side.dtype != dtype):
        raise ValueError(
            f"{op}: side must be {shape} in {dtype}, got {list(side.shape)} in {side.dtype}"
        )


BLOCK = Block(
    "packed_mamba_band",
    MambaBlockStructure,
    PARAMETERS,
    MambaBlockSizes,
    ranges=dict.fromkeys(("reverse", "merges", "is_bfloat16"), FLAG),
    floats={"eps": Real(0)},
    derive=derive,
    refusal=refuse,
    leading=("reverse", "merges"),
    further=_check_call,
    kernel="packed_mamba_block",
)


class Inputs(NamedTuple):
    """The op's arguments; ``ints`` are ``reverse``, ``merges`` and the sizes."""

    y: Tensor
    weights: Tensor
    state: Tensor
    side: Tensor | None
    ints: Sequence[int]
    eps: float


def _results(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Unwritten memory for both results."""
    y, (_, merges, *sizes) = inputs.y, inputs.ints
    s = MambaBlockSizes(*sizes)
    shape, dtype = y.shape, y.dtype
    if not merges:
        shape = (*y.shape[:2], s.inner)
        dtype = torch.bfloat16 if s.is_bfloat16 else dtype
    return y.new_empty(shape, dtype=dtype), inputs.state.new_empty(inputs.state.shape)


def packed_mamba_band_definition(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See :func:`packed_mamba_band`. It rounds where the kernels round."""
    return _compose(inputs, define)


def _compose(inputs: Inputs, run: Run) -> tuple[Tensor, Tensor]:
    y, weights, state, side, (reverse, merges, *sizes), eps = inputs
    s = MambaBlockSizes(*sizes)
    p = BLOCK.split(weights, y.shape[-1], s, y.dtype)
    x, z = project(y, p, s, eps).chunk(2, dim=-1)
    scanned, seen = state.to(y.dtype).split((STATES * s.inner, (s.taps - 1) * s.inner))
    seen = seen.view(1, s.taps - 1, s.inner)
    x = torch.cat((x, seen) if reverse else (seen, x), dim=1)
    u = convolve(x, p, s, reverse, run)
    u = u[:, : y.shape[1]] if reverse else u[:, s.taps - 1 :]
    sums, after = scan(u, p, s, reverse, scanned.view(1, STATES, s.inner).mT, run)
    seen = x[:, : s.taps - 1] if reverse else x[:, y.shape[1] :]
    behind = torch.cat((after.mT.flatten(), seen.flatten())).to(state.dtype)
    if not merges:
        return sums.to(p["in_proj"].dtype), behind
    return answer(y, sums + side.to(y.dtype), z, p), behind


def _forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    y, weights, state, side, ints, eps = inputs
    out, behind = _results(inputs)
    state, side = state.contiguous(), None if side is None else side.contiguous()
    others = {"state": state.data_ptr(), "next_state": behind.data_ptr()}
    if side is not None:
        others["side"] = side.data_ptr()
    return BLOCK.run(y, weights, ints, (eps,), out, **others), behind


def _flops(shapes: Inputs) -> int:
    """FLOPs of the products, the convolution and one direction's scan."""
    (_, length, dim), (_, merges, *sizes) = shapes.y, shapes.ints
    s = MambaBlockSizes(*sizes)
    weights = s.inner * ((1 + 2 * merges) * dim + s.taps + 2 * STATES + 2 * s.rank)
    scan = flops_of("selective_scan", u=[1, length, s.inner], A=[s.inner, STATES])
    return 2 * length * weights + scan


OP = Op(
    "packed_mamba_band",
    Inputs,
    BLOCK.contract("words", ("ints", "eps"), ("side",), state="numbers", side="? B T inner"),
    packed_mamba_band_definition,
    {"cpu": Backend(_forward, None, BLOCK.refusal)},
    _results,
    schema="(Tensor y, Tensor weights, Tensor state, Tensor? side, int[] ints, float eps)"
    " -> (Tensor, Tensor)",
    results=2,
    composition=lambda inputs: _compose(inputs, run_op),
    flops=_flops,
)


def packed_mamba_band(
    y: Tensor,
    weights: Tensor,
    state: Tensor,
    side: Tensor | None,
    sizes: MambaBlockSizes,
    *,
    reverse: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Run one direction of a block of Vim or Mamba-Reg on some tokens of a sequence, on a CPU.

    Earlier calls have processed the tokens before these, in scan order. Their state consists of the
    scan's state [N, E] and of x of the last K - 1 tokens, in the order of the sequence. It is 0
    before the first token. Rounding is that of :func:`packed_mamba_block`.

    Args:
        y: tokens [1, T, D], float32.
        weights: the block's parameters, from ``BLOCK.join``.
        state: [S], see :func:`state_numbers`.
        side: the other direction's sums [1, T, E] in the packed weights' dtype, to compute the
            block's tokens; None to return only this direction's sums.
        sizes: the block's sizes.
        reverse: whether the scan goes from the last token to the first.
        eps: of the RMSNorm.

    Returns:
        The block's tokens [1, T, D], or the sums [1, T, E] in the packed weights' dtype; and the
        state after the tokens.

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: the tensors and numbers do not fit one block.
    """
    ints = int(reverse), int(side is not None), *sizes
    return call(OP, Inputs(y, weights, state, side, ints, eps))
