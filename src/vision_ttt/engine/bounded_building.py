"""Building a model for weights that are there, and no larger one than they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

# Constructors make parameters that are replaced later, and register some under several names.
_TIMES = 4
_MORE_TENSORS = 256
_MORE_ELEMENTS = 1 << 24


class LargerModelError(ValueError):
    """A model has more parameters than the weights that it is built for."""


@contextmanager
def no_larger_than(weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Stop what this thread builds within the context, once it is far larger than `weights`.

    A parameter is counted when a module gets it, before it is filled with values; so neither memory
    nor time is spent on a model of millions of blocks or channels that a damaged file describes.

    Raises:
        LargerModelError: within the context, from the constructor.
    """
    most_tensors = _TIMES * len(weights) + _MORE_TENSORS
    most_elements = _TIMES * sum(each.numel() for each in weights.values()) + _MORE_ELEMENTS
    own, tensors, elements = threading.get_ident(), 0, 0

    def count(_module: nn.Module, _name: str, parameter: Tensor | None) -> None:
        nonlocal tensors, elements
        if parameter is None or threading.get_ident() != own:
            return
        tensors, elements = tensors + 1, elements + parameter.numel()
        if tensors > most_tensors or elements > most_elements:
            raise LargerModelError(
                f"it would have more than {tensors:,} parameters of {elements:,} values; there are"
                f" weights for {len(weights):,}"
            )

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()
