"""The memory layout of a linear layer's weight for the kernels of csrc/products and csrc/blocks."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vision_ttt.ops import _native
from vision_ttt.ops._native import instruction_set, mirrors
from vision_ttt.ops._op import Op

PANEL = 16
"""Columns of a panel. A product's registers hold the sums of one to four panels for a few rows."""

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of a packed weight."""


_TERMS = 3
_STEP = 32
"""Numbers of the inner axis that one instruction on tiles multiplies."""


def blocks_have_terms(dtype: torch.dtype) -> bool:
    """Whether the blocks' kernels take weights of this dtype as three bfloat16 terms.

    On processors with tile registers, they multiply float32 in this form; see csrc/amx/terms.h.
    """
    return dtype == torch.float32 and instruction_set() == "amx"


def packed_shape(
    columns: int, inner: int, dtype: torch.dtype, of_block: bool = False
) -> tuple[int, ...]:
    """The shape of :func:`pack`'s result."""
    panels = -(-columns // PANEL)
    if of_block and blocks_have_terms(dtype):
        return (panels, -(-inner // _STEP), _TERMS, PANEL, PANEL)
    if dtype == torch.bfloat16:
        return (panels, -(-inner // 2), PANEL, 2)
    return (panels, inner, PANEL)


def pack(weight: Tensor, dtype: torch.dtype, of_block: bool = False) -> Tensor:
    """Cut the transposed weight into panels of 16 columns, one after the other in memory.

    A panel is [inner, 16], in bfloat16 [inner / 2, 16, 2] for dot products of pairs. The last panel
    and an odd inner axis of bfloat16 are padded with zeros.

    Where the processor has tile registers, a panel of a block's weight in float32 is
    [inner / 32, 3, 16, 16]: 32 numbers of the inner axis as sums of three bfloat16 terms. The terms
    of numbers i and i + 16 are the halves of a float's bits.

    Args:
        weight: [columns, inner] of a linear layer.
        dtype: float32 or bfloat16, to round to.
        of_block: whether the weight is for the op of a whole block. The op of a single layer uses
            the smaller layout, which is faster for few rows.

    Returns:
        [panels, inner, 16] in float32, [panels, inner / 2, 16, 2] in bfloat16,
        [panels, inner / 32, 3, 16, 16] in terms.

    Raises:
        ValueError: the dtype is not supported, or the weight is not a matrix.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {dtype}")
    if weight.ndim != 2 or not weight.numel():
        raise ValueError(f"weight must be [columns, inner], got {list(weight.shape)}")
    columns, inner = weight.shape
    in_terms = of_block and blocks_have_terms(dtype)
    multiple = _STEP if in_terms else 2 if dtype == torch.bfloat16 else 1
    weight = F.pad(weight.detach().to(dtype), (0, -inner % multiple, 0, -columns % PANEL))
    panels = weight.unflatten(0, (-1, PANEL))  # [panels, 16, inner]
    if in_terms:
        return _split(panels.unflatten(2, (-1, 2, PANEL)).permute(0, 2, 3, 4, 1))
    if dtype == torch.float32:
        return panels.transpose(1, 2).contiguous()
    return panels.unflatten(2, (-1, 2)).transpose(1, 2).contiguous()


def unpack(packed: Tensor, columns: int, inner: int) -> Tensor:
    """Invert :func:`pack`: return the weight [columns, inner] in the packed dtype."""
    if packed.ndim == 5:  # of terms
        panels = _join(packed).permute(0, 4, 1, 2, 3).flatten(2)
    elif packed.ndim == 4:  # of pairs
        panels = packed.transpose(1, 2).flatten(2)
    else:
        panels = packed.transpose(1, 2)
    return panels.flatten(0, 1)[:columns, :inner]


def _split(numbers: Tensor) -> Tensor:
    """Terms [panels, steps, 3, 16, 16] of numbers [panels, steps, 2, 16, 16]."""
    terms = []
    for _ in range(_TERMS):
        bits = numbers.contiguous().view(torch.int32)
        upper = bits & -(1 << 16)
        low, high = upper.unbind(2)
        terms.append((low >> 16 & 0xFFFF) | high)
        numbers = numbers - upper.view(torch.float32)
    return torch.stack(terms, 2).view(torch.float32)


def _join(terms: Tensor) -> Tensor:
    """Numbers [panels, steps, 2, 16, 16] of terms [panels, steps, 3, 16, 16] in any wider dtype."""
    bits = terms.to(torch.float32).contiguous().view(torch.int32)
    halves = torch.stack((bits << 16, bits & -(1 << 16)), 3).view(torch.float32)
    first, second, third = halves.unbind(2)
    return (first + (second + third)).to(terms.dtype)


def check_packed(op: str, weight: Tensor, columns: int, inner: int) -> None:
    """Raise an error unless ``weight`` has the shape of a packed [columns, inner].

    Raises:
        ValueError: it has another.
    """
    shape = packed_shape(columns, inner, weight.dtype)
    if weight.shape != shape:
        raise ValueError(
            f"{op}: weight [{columns}, {inner}] packed in {weight.dtype} must be {list(shape)}, "
            f"got {list(weight.shape)}"
        )


def refusal(x: Tensor) -> str | None:
    """The reason why the kernels do not support a call on x, or None if they do."""
    if not x.is_cpu:
        return f"tensors are on {x.device.type}"
    return None if _native.LIBRARY is not None else "the compiled kernels are missing"


def call(op: Op, inputs: Any) -> Any:
    """Call an op with autocast off: the weights were rounded when they were packed."""
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            return op(inputs)
    return op(inputs)


@mirrors("Packed")
class PackedStructure(ctypes.Structure):
    """``Packed`` of csrc/products/packed/packed.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("data", "bias")),
        *((name, c_int64) for name in ("inner", "columns", "in_terms")),
    )


@mirrors("NormParameters")
class NormStructure(ctypes.Structure):
    """``NormParameters`` of csrc/pointwise/pointwise.h."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("image_stride", c_int64),
        ("eps", c_double),
    )
