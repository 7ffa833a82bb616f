"""The op ``vision_ttt::packed_linear``: a linear layer whose weight is packed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from vision_ttt.ops._dispatcher_bypass import may_bypass_dispatcher
from vision_ttt.ops._native import LIBRARY, call_kernel, mirrors
from vision_ttt.ops.packed.product_arguments import check_tensors, check_weight
from vision_ttt.ops.packed.weights import PackedStructure, resolve_negative, unpack


@mirrors("PackedLinear")
class _PackedLinear(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("weight", PackedStructure),
        *((name, c_int64) for name in ("rows", "x_row", "out_row", "is_bfloat16")),
        *((name, c_int64) for name in ("x_is_bfloat16", "out_is_bfloat16", "threads")),
    )


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    """x Wᵀ + b with W packed by :func:`pack`, for inference on a CPU.

    Factors are rounded to the dtype of the packed W; sums are in float32.

    Args:
        x: [..., inner], float32 or bfloat16.
        weight: ``pack(W, dtype)``.
        bias: [columns], float32, or None.
        columns: the number of W's rows.

    Returns:
        [..., columns] in x's dtype.

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: shapes do not fit, or a tensor is not a dense one on a CPU.
    """
    if may_bypass_dispatcher((x, weight, bias)):
        return _packed_linear(x, weight, bias, columns)
    return torch.ops.vision_ttt.packed_linear(x, weight, bias, columns)


torch.library.define(
    "vision_ttt::packed_linear", "(Tensor x, Tensor weight, Tensor? bias, int columns) -> Tensor"
)


@functools.lru_cache(maxsize=256)
def _check_shapes(
    x: torch.Size, weight: torch.Size, dtype: torch.dtype, bias: torch.Size | None, columns: int
) -> None:
    if not x or columns < 1 or not x[-1]:
        raise ValueError(
            f"packed_linear: x must be [..., inner] and columns at least 1, got {list(x)} and "
            f"{columns}"
        )
    check_weight("packed_linear", weight, dtype, bias, columns, x[-1])


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    check_tensors("packed_linear", weight, bias, x=x)
    bias_shape = None if bias is None else bias.shape
    _check_shapes(x.shape, weight.shape, weight.dtype, bias_shape, columns)
    if LIBRARY is None:
        return packed_linear_definition(x, weight, bias, columns)
    inner = x.shape[-1]
    rows = resolve_negative(x).reshape(-1, inner)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    weight = resolve_negative(weight).contiguous()
    bias = None if bias is None else resolve_negative(bias).contiguous()
    out = x.new_empty(*x.shape[:-1], columns)
    if out.numel():
        problem = _PackedLinear(
            rows.data_ptr(),
            out.data_ptr(),
            PackedStructure.of(weight, bias, columns, inner),
            *(rows.shape[0], rows.stride(0), columns, weight.dtype == torch.bfloat16),
            *(x.dtype == torch.bfloat16, x.dtype == torch.bfloat16, torch.get_num_threads()),
        )
        if call_kernel("vision_ttt_packed_linear", problem):
            raise MemoryError("packed_linear: not enough memory for the scratch of a thread")
    return out


def packed_linear_definition(
    x: Tensor, weight: Tensor, bias: Tensor | None, columns: int
) -> Tensor:
    """The definition of :func:`packed_linear`, in PyTorch's operations."""
    unpacked = at_least_float32(unpack(weight, columns, x.shape[-1]))
    rounded = at_least_float32(x.to(weight.dtype))
    return F.linear(rounded, unpacked, bias).to(x.dtype)


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or in its own precision where that is higher."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


torch.library.impl("vision_ttt::packed_linear", "CPU", _packed_linear)


@torch.library.register_fake("vision_ttt::packed_linear")
def _(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], columns)


@register_flop_formula(torch.ops.vision_ttt.packed_linear)
def packed_linear_flops(
    x_shape: Sequence[int], _weight: object, _bias: object, columns: int, **_: object
) -> int:
    """Two FLOPs per number of W and row of x."""
    rows = 1
    for n in x_shape:
        rows *= n
    return 2 * rows * columns
