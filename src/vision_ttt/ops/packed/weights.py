"""The layout in which the kernels of csrc/packed read a linear layer's weight."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn import functional as F

PANEL = 64
"""Columns of a panel, of which a product's registers hold the sums for a few rows."""

DTYPES = (torch.float32, torch.bfloat16)


def padded(columns: int, inner: int, dtype: torch.dtype) -> tuple[int, int]:
    """Columns and inner numbers that a packed weight [columns, inner] has place for."""
    step = 2 if dtype == torch.bfloat16 else 1
    return -(-columns // 16) * 16, -(-inner // step) * step


def packed_size(columns: int, inner: int, dtype: torch.dtype) -> int:
    """Numbers in :func:`pack`'s result."""
    width, depth = padded(columns, inner, dtype)
    return width * depth


def pack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cut the transposed weight into panels of 64 columns that lie in memory one after the other.

    A panel is [inner, 64], in bfloat16 [inner / 2, 64, 2], as the dot products of pairs take it. The
    last panel is as narrow as the columns left, filled up with zeros to a multiple of 16.

    Args:
        weight: [columns, inner] of a linear layer.
        dtype: float32 or bfloat16, to round to.

    Returns:
        A vector in that dtype.

    Raises:
        ValueError: another dtype, or a weight that is no matrix.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {dtype}")
    if weight.ndim != 2 or not weight.numel():
        raise ValueError(f"weight must be [columns, inner], got {list(weight.shape)}")
    columns, inner = weight.shape
    width, depth = padded(columns, inner, dtype)
    weight = F.pad(weight.detach().to(dtype), (0, depth - inner, 0, width - columns))
    return torch.cat([_panel(part).flatten() for part in weight.split(PANEL)])


def unpack(packed: Tensor, columns: int, inner: int) -> Tensor:
    """The weight [columns, inner] that :func:`pack` packed, in the packed dtype."""
    width, depth = padded(columns, inner, packed.dtype)
    step = depth if packed.dtype == torch.float32 else 2
    parts = packed.split([min(PANEL, width - start) * depth for start in range(0, width, PANEL)])
    if packed.dtype == torch.float32:
        panels = [part.view(depth, -1).t() for part in parts]
    else:
        panels = [
            part.view(depth // step, -1, step).transpose(0, 1).flatten(1) for part in parts
        ]
    return torch.cat(panels)[:columns, :inner]


def _panel(rows: Tensor) -> Tensor:
    if rows.dtype == torch.float32:
        return rows.t()
    return rows.unflatten(1, (-1, 2)).transpose(0, 1)


class PackedStructure(ctypes.Structure):
    """csrc/packed/packed.h's Packed."""

    _fields_ = (("data", c_void_p), ("bias", c_void_p), ("inner", c_int64), ("columns", c_int64))

    @classmethod
    def of(cls, data: Tensor, bias: Tensor | None, columns: int, inner: int) -> PackedStructure:
        """Describe a packed weight [columns, inner]; an empty one there is none of."""
        if not data.numel():
            return cls()
        return cls(data.data_ptr(), None if bias is None else bias.data_ptr(), inner, columns)


class NormStructure(ctypes.Structure):
    """csrc/packed/packed.h's NormParameters."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("image_stride", c_int64),
        ("eps", c_double),
    )

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor, eps: float) -> NormStructure:
        """Describe a LayerNorm that is the same for all images."""
        return cls(weight.data_ptr(), bias.data_ptr(), 0, eps)
