"""Shapes with symbols for sizes: how a contract writes them, and how tensors' sizes match them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Axis = int | str | tuple[str, ...]
"""A size, a symbol, or a product of both."""
Shape = tuple[Axis, ...]
"""The axes of a tensor."""


def parse_axis(text: str) -> Axis:
    """The axis that a text names: a number, a symbol, or a product of both with ``*``."""
    factors = tuple(text.split("*"))
    if len(factors) > 1:
        return factors
    return int(text) if text.isdecimal() else text


def bind(sizes: Sequence[int], shape: Shape, known: dict[str, Any]) -> bool:
    """Whether sizes match the shape. A match adds its new symbols to ``known``."""
    if shape and shape[0] == "...":
        shape = shape[1:]
        if len(sizes) < len(shape):
            return False
        lead = len(sizes) - len(shape)
        if known.setdefault("...", tuple(sizes[:lead])) != tuple(sizes[:lead]):
            return False
        sizes = sizes[lead:]
    if len(sizes) != len(shape):
        return False
    found: dict[str, Any] = {}
    for size, axis in zip(sizes, shape, strict=True):
        if isinstance(axis, str):
            wanted = known.get(axis)
            if wanted is None:
                wanted = found.setdefault(axis, size)
        elif isinstance(axis, int):
            wanted = axis
        else:
            wanted = _product(axis, size, known, found)
        if size != wanted:
            return False
    known.update(found)
    return True


def _product(factors: tuple[str, ...], size: int, known: Mapping[str, Any], found: dict) -> int:
    """The product of the factors; a single unknown factor is solved for from ``size``."""
    product, unknown = 1, None
    for factor in factors:
        if factor.isdecimal():
            product = product * int(factor)
        elif factor in known:
            product = product * known[factor]
        else:
            unknown = factor
    if unknown is None:
        return product
    found[unknown] = size // product if product else 0
    return product * found[unknown]


def axis_text(axis: Axis, known: Mapping[str, Any]) -> str:
    """An axis for messages: its size where it is known, else its symbols."""
    if not isinstance(axis, tuple):
        return str(known.get(axis, axis))
    text = "*".join(axis)
    if all(f.isdecimal() or f in known for f in axis):
        return f"{text} = {_product(axis, 0, known, {})}"
    return text


def shape_text(shape: Shape, known: Mapping[str, Any]) -> str:
    """A shape for messages: sizes where they are known, else symbols."""
    return f"[{', '.join(axis_text(a, {} if a == '...' else known) for a in shape)}]"
