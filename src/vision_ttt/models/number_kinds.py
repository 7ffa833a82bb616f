"""Kinds of numbers in weights, which PyTorch would copy into each other without a word."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def of_another_kind(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """Name the weights whose numbers are of another kind than a model's own, with both dtypes.

    The kinds are floating-point numbers, complex ones, whole ones and truth values. The precision
    may differ.

    Args:
        weights: by name; those that the model does not have are left out.
        own: the model's state dict.
    """
    return [
        f"{name} {value.dtype} for {own[name].dtype}"
        for name, value in weights.items()
        if name in own and kind_of_number(value.dtype) != kind_of_number(own[name].dtype)
    ]


def kind_of_number(dtype: torch.dtype) -> str:
    """Return which kind of numbers a dtype holds."""
    if dtype == torch.bool:
        return "truth values"
    if dtype.is_complex:
        return "complex"
    return "floating-point" if dtype.is_floating_point else "whole"
