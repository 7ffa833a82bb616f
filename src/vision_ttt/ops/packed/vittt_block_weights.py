"""The parameters of a packed Vittt block, and their places in one vector."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops._learner_cpu import DIMENSIONS, LARGEST_MINI_BATCH
from vision_ttt.ops._native import LANES, LIBRARY
from vision_ttt.ops.packed.parameter_vector import Place, join, places, split
from vision_ttt.ops.packed.weights import packed_shape


class VitttBlockParameters(NamedTuple):
    """A block's parameters; a part that the block lacks has an empty tensor.

    D channels, R directions, H heads of all directions with d channels each, H · d = R · D; E = 4 d
    is the width of an inner MLP. The packed tensors share a dtype, the others are float32.
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
"""Names of the packed parameters."""


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


def join_parameters(parameters: VitttBlockParameters, sizes: VitttBlockSizes) -> Tensor:
    """Copy a block's parameters into one vector, the form that the op expects.

    Raises:
        ValueError: the parameters do not fit a block of these sizes.
    """
    dim = len(parameters.norm_weight)
    for name, x, place in zip(parameters._fields, parameters, layout(dim, sizes), strict=True):
        if x.shape != place.shape or x.dtype != place.dtype:
            raise ValueError(
                f"packed_vittt_block: {name} must be {list(place.shape)} in {place.dtype}, got "
                f"{list(x.shape)} in {x.dtype}"
            )
    return join(parameters)


def split_parameters(words: Tensor, dim: int, sizes: VitttBlockSizes) -> VitttBlockParameters:
    """Return the parameters in the vector as views of it."""
    return VitttBlockParameters(*split(words, layout(dim, sizes)))


def refusal(dim: int, head_dim: int, mini_batch_size: int, hidden: int) -> str | None:
    """The reason why the kernels do not support a block of these sizes, or None if they do."""
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


@functools.lru_cache(maxsize=64)
def layout(dim: int, sizes: VitttBlockSizes) -> Sequence[Place]:
    """The place of each parameter of a block, in the order of VitttBlockParameters.

    Raises:
        ValueError: the sizes contradict each other, or the kernels do not support them.
    """
    shapes = _shapes(dim, sizes)
    packed = torch.bfloat16 if sizes.is_bfloat16 else torch.float32
    return places(
        (shapes[name], packed if name in PACKED and shapes[name] != (0,) else torch.float32)
        for name in VitttBlockParameters._fields
    )


def _shapes(dim: int, sizes: VitttBlockSizes) -> dict[str, tuple[int, ...]]:
    heads, directions, taps, hidden, mini_batch_size, kernel, views, *flags = sizes
    if min(dim, heads, hidden, mini_batch_size) < 1 or min(taps, kernel) < 0:
        raise ValueError(f"packed_vittt_block: got {dim} channels and {sizes}")
    if views not in (2, 3) or any(flag not in (0, 1) for flag in flags):
        raise ValueError(f"packed_vittt_block: views must be 2 or 3, flags 0 or 1, got {sizes}")
    if kernel and kernel % 2 == 0:
        raise ValueError(f"packed_vittt_block: conv2d's kernel must be odd, got {kernel}")
    inner = directions * dim
    if directions not in (1, 2) or inner % heads or heads % directions:
        raise ValueError(f"packed_vittt_block: {heads} heads in {directions} directions of {dim}")
    head_dim = inner // heads
    reason = refusal(dim, head_dim, mini_batch_size, hidden)
    if reason:
        raise ValueError(f"packed_vittt_block: {reason}")
    gated, is_mlp, is_bfloat16 = flags
    wide = 4 * head_dim if is_mlp else head_dim

    def packed(columns: int, inner: int) -> tuple[int, ...]:
        dtype = torch.bfloat16 if is_bfloat16 else torch.float32
        return packed_shape(columns, inner, dtype, of_block=True)

    return {
        "conv2d": (kernel * kernel, dim) if kernel else (0,),
        **dict.fromkeys(("norm_weight", "norm_bias", "mlp_norm_weight", "mlp_norm_bias"), (dim,)),
        "views": packed(views * inner, dim),
        "gate": packed(dim, dim) if gated else (0,),
        "rates": packed(heads, dim),
        "rates_bias": (heads,),
        **dict.fromkeys(("conv_q_weight", "conv_k_weight"), (inner, taps) if taps else (0,)),
        **dict.fromkeys(("conv_q_bias", "conv_k_bias"), (inner,) if taps else (0,)),
        "w1": (heads, head_dim, wide),
        "b1": (heads, wide),
        "w2": (heads, wide, head_dim) if is_mlp else (0,),
        "b2": (heads, head_dim) if is_mlp else (0,),
        **dict.fromkeys(("inner_weight", "inner_bias"), (heads, head_dim)),
        "position_scale": (directions, mini_batch_size),
        **dict.fromkeys(("post_weight", "post_bias"), (directions, dim)),
        "out_proj": packed(dim, dim),
        **dict.fromkeys(("mlp_gate", "mlp_value"), packed(hidden, dim)),
        "mlp_out": packed(dim, hidden),
    }
