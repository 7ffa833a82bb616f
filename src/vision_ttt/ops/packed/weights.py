"""The memory layout of a linear layer's weight for the kernels of csrc/packed."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn import functional as F

from vision_ttt.ops._native import mirrors

PANEL = 16
"""Columns of a panel. A product's registers hold the sums of one to four panels for a few rows."""

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of a packed weight."""


def packed_shape(columns: int, inner: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of :func:`pack`'s result."""
    panels = -(-columns // PANEL)
    if dtype == torch.bfloat16:
        return (panels, -(-inner // 2), PANEL, 2)
    return (panels, inner, PANEL)


def pack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cut the transposed weight into panels of 16 columns, one after the other in memory.

    A panel is [inner, 16], in bfloat16 [inner / 2, 16, 2] for dot products of pairs. The last panel
    and an odd inner axis of bfloat16 are padded with zeros.

    Args:
        weight: [columns, inner] of a linear layer.
        dtype: float32 or bfloat16, to round to.

    Returns:
        [panels, inner, 16] in float32, [panels, inner / 2, 16, 2] in bfloat16.

    Raises:
        ValueError: the dtype is not supported, or the weight is not a matrix.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {dtype}")
    if weight.ndim != 2 or not weight.numel():
        raise ValueError(f"weight must be [columns, inner], got {list(weight.shape)}")
    columns, inner = weight.shape
    odd = inner % 2 if dtype == torch.bfloat16 else 0
    weight = F.pad(weight.detach().to(dtype), (0, odd, 0, -columns % PANEL))
    panels = weight.unflatten(0, (-1, PANEL))  # [panels, 16, inner]
    if dtype == torch.float32:
        return panels.transpose(1, 2).contiguous()
    return panels.unflatten(2, (-1, 2)).transpose(1, 2).contiguous()


def unpack(packed: Tensor, columns: int, inner: int) -> Tensor:
    """Invert :func:`pack`: return the weight [columns, inner] in the packed dtype."""
    panels = packed.transpose(1, 2)
    if packed.ndim == 4:  # of pairs
        panels = panels.flatten(2)
    return panels.flatten(0, 1)[:columns, :inner]


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
