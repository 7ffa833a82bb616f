"""The memory layout of a linear layer's weight for the kernels of csrc/packed."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn import functional as F

from vision_ttt.ops._native import mirrors

PANEL = 64
"""Columns of a panel. A product's registers hold a panel's sums for a few rows."""

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of a packed weight."""


def padded(columns: int, inner: int, dtype: torch.dtype) -> tuple[int, int]:
    """The padded sizes of a packed weight [columns, inner]."""
    step = 2 if dtype == torch.bfloat16 else 1
    return -(-columns // 16) * 16, -(-inner // step) * step


def packed_shape(columns: int, inner: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of :func:`pack`'s result."""
    width, depth = padded(columns, inner, dtype)
    return (width * depth // 2, 2) if dtype == torch.bfloat16 else (width * depth,)


def pack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cut the transposed weight into panels of 64 columns, one after the other in memory.

    A panel is [inner, 64], in bfloat16 [inner / 2, 64, 2] for dot products of pairs. The last panel
    has the remaining columns, padded with zeros to a multiple of 16.

    Args:
        weight: [columns, inner] of a linear layer.
        dtype: float32 or bfloat16, to round to.

    Returns:
        A vector in float32, [pairs, 2] in bfloat16.

    Raises:
        ValueError: the dtype is not supported, or the weight is not a matrix.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {dtype}")
    if weight.ndim != 2 or not weight.numel():
        raise ValueError(f"weight must be [columns, inner], got {list(weight.shape)}")
    columns, inner = weight.shape
    width, depth = padded(columns, inner, dtype)
    weight = F.pad(weight.detach().to(dtype), (0, depth - inner, 0, width - columns))
    panels = weight.split(PANEL)
    if dtype == torch.float32:
        return torch.cat([panel.t().flatten() for panel in panels])
    pairs = [panel.unflatten(1, (-1, 2)).transpose(0, 1) for panel in panels]
    return torch.cat([panel.flatten(0, 1) for panel in pairs])


def unpack(packed: Tensor, columns: int, inner: int) -> Tensor:
    """Invert :func:`pack`: return the weight [columns, inner] in the packed dtype."""
    pairs = packed.ndim == 2
    width, depth = padded(columns, inner, torch.bfloat16 if pairs else torch.float32)
    sizes = [min(PANEL, width - start) * depth for start in range(0, width, PANEL)]
    parts = packed.reshape(-1).split(sizes)
    if pairs:
        panels = [x.view(depth // 2, -1, 2).transpose(0, 1).flatten(1) for x in parts]
    else:
        panels = [x.view(depth, -1).t() for x in parts]
    return torch.cat(panels)[:columns, :inner]


def as_it_lies(x: Tensor) -> Tensor:
    """x, or a copy where x is a lazily negated view, whose memory holds the negatives."""
    return x.resolve_neg()


@mirrors("Packed")
class PackedStructure(ctypes.Structure):
    """``Packed`` of csrc/packed/packed.h."""

    _fields_ = (("data", c_void_p), ("bias", c_void_p), ("inner", c_int64), ("columns", c_int64))

    @classmethod
    def of(cls, data: Tensor, bias: Tensor | None, columns: int, inner: int) -> PackedStructure:
        """Describe a packed weight [columns, inner]. An empty tensor gives null pointers."""
        if not data.numel():
            return cls()
        return cls(data.data_ptr(), None if bias is None else bias.data_ptr(), inner, columns)


@mirrors("NormParameters")
class NormStructure(ctypes.Structure):
    """``NormParameters`` of csrc/packed/packed.h."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("image_stride", c_int64),
        ("eps", c_double),
    )

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor, eps: float) -> NormStructure:
        """Describe a LayerNorm with the same parameters for all images."""
        return cls(weight.data_ptr(), bias.data_ptr(), 0, eps)
