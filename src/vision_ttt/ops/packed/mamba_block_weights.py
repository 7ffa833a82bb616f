"""The parameters of a packed Mamba block, and their places in one vector."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops._native import LANES, LIBRARY
from vision_ttt.ops.packed.parameter_vector import Place, join, places, split
from vision_ttt.ops.packed.weights import packed_shape

STATES = 16
"""N, the numbers of a channel's state, which the kernels hold in registers."""


class MambaBlockParameters(NamedTuple):
    """A block's parameters.

    D channels of tokens, E channels of either direction, K taps, rank R, N = 16 states. Where there
    are two of a kind, the first is of the direction from the first token to the last. The packed
    tensors share a dtype, the others are float32.
    """

    norm: Tensor  # [D]
    in_proj: Tensor  # packed [2 E, D]: x, z
    conv: Tensor  # [2, K, E]
    conv_bias: Tensor  # [2, E]
    vectors_forth: Tensor  # packed [2 N, E]: B, C
    vectors_back: Tensor
    low_forth: Tensor  # packed [R, E]
    low_back: Tensor
    steps_forth: Tensor  # packed [E, R]
    steps_back: Tensor
    steps_bias: Tensor  # [2, E]
    decay: Tensor  # [2, N, E]: A / ln 2
    skip: Tensor  # [2, E]
    out_proj: Tensor  # packed [D, E]


class MambaBlockSizes(NamedTuple):
    """The numbers that, with D, determine the shapes of a block's parameters."""

    inner: int  # E
    taps: int  # K
    rank: int  # R, even
    is_bfloat16: int  # 0 or 1: the packed weights are bfloat16


def join_parameters(parameters: MambaBlockParameters, sizes: MambaBlockSizes) -> Tensor:
    """Copy a block's parameters into one vector, the form that the op expects.

    Raises:
        ValueError: the parameters do not fit a block of these sizes.
    """
    dim = len(parameters.norm)
    for name, x, place in zip(parameters._fields, parameters, layout(dim, sizes), strict=True):
        if x.shape != place.shape or x.dtype != place.dtype:
            raise ValueError(
                f"packed_mamba_block: {name} must be {list(place.shape)} in {place.dtype}, got "
                f"{list(x.shape)} in {x.dtype}"
            )
    return join(parameters)


def split_parameters(words: Tensor, dim: int, sizes: MambaBlockSizes) -> MambaBlockParameters:
    """Return the parameters in the vector as views of it."""
    return MambaBlockParameters(*split(words, layout(dim, sizes)))


def refusal(dim: int, inner: int, states: int) -> str | None:
    """The reason why the kernels do not support a block of these sizes, or None if they do."""
    if LIBRARY is None:
        return "the compiled kernels are missing"
    if states != STATES:
        return f"state {states} is not {STATES}"
    for name, size in (("dim", dim), ("inner dimension", inner)):
        if size % LANES:
            return f"{name} {size} is not a multiple of {LANES}"
    return None


@functools.lru_cache(maxsize=64)
def layout(dim: int, sizes: MambaBlockSizes) -> Sequence[Place]:
    """The place of each parameter of a block, in the order of MambaBlockParameters.

    Raises:
        ValueError: the sizes contradict each other, or the kernels do not support them.
    """
    inner, taps, rank, is_bfloat16 = sizes
    if min(dim, inner, taps, rank) < 1 or rank % 2 or is_bfloat16 not in (0, 1):
        raise ValueError(
            f"packed_mamba_block: sizes must be at least 1, rank even and is_bfloat16 0 or 1, got "
            f"{dim} channels and {sizes}"
        )
    reason = refusal(dim, inner, STATES)
    if reason:
        raise ValueError(f"packed_mamba_block: {reason}")
    dtype = torch.bfloat16 if is_bfloat16 else torch.float32
    packed = {
        "in_proj": (2 * inner, dim),
        **dict.fromkeys(("vectors_forth", "vectors_back"), (2 * STATES, inner)),
        **dict.fromkeys(("low_forth", "low_back"), (rank, inner)),
        **dict.fromkeys(("steps_forth", "steps_back"), (inner, rank)),
        "out_proj": (dim, inner),
    }
    others = {
        "norm": (dim,),
        "conv": (2, taps, inner),
        **dict.fromkeys(("conv_bias", "steps_bias", "skip"), (2, inner)),
        "decay": (2, STATES, inner),
    }
    return places(
        (packed_shape(*packed[name], dtype, of_block=True), dtype)
        if name in packed
        else (others[name], torch.float32)
        for name in MambaBlockParameters._fields
    )
