"""Where in a model NaN or infinity first appears."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


def find_non_finite(
    model: nn.Module, forward: Callable[[], Any], tensors: Mapping[str, Tensor]
) -> str:
    """Return where NaN or infinity first appears: the batch, a module's output, or a gradient.

    Args:
        model: the model after the backward pass of the offending batch.
        forward: runs `model` on that batch again.
        tensors: the batch's, by name.
    """
    for name, tensor in tensors.items():
        if not _is_finite(tensor):
            return f"the batch's {name}"
    found = find_in_forward(model, forward)
    if found is not None:
        return found
    # Gradients flow from the loss to the input, so the last parameter's appeared first.
    for name, weight in reversed(list(model.named_parameters())):
        if weight.grad is not None and not torch.isfinite(weight.grad).all():
            return f"the gradient of parameter {name!r}"
    return "the loss or the gradient's norm"


def find_in_forward(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """Return where NaN or infinity first appears: a weight, or a module's output; None if nowhere.

    Args:
        forward: runs `model`.
    """
    # By the weights first: where they are so, the next module's output is a symptom.
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, weight in named:
            if not _is_finite(weight):
                return f"{kind} {name!r}"
    found = _first_output(model, forward)
    return None if found is None else f"the output of module {found!r}"


@dataclass
class Calls:
    """What a model was called with: the first time that its output was not finite, or last."""

    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    are_finite: bool = True
    """Whether all outputs were finite."""


@contextmanager
def watched_calls(model: nn.Module) -> Iterator[Calls]:
    """Keep what `model` is called with, and whether its outputs are finite, within the context."""
    calls = Calls()

    def before(_module: nn.Module, arguments: Any, keywords: Any) -> None:
        if calls.are_finite:
            calls.arguments, calls.keywords = arguments, keywords

    def after(_module: nn.Module, _arguments: Any, output: Any) -> None:
        calls.are_finite = calls.are_finite and _is_finite(output)

    handles = (
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after),
    )
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _first_output(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not found and not _is_finite(output):
                found.append(name)

        return hook

    # A module's hook runs after its children's: the innermost module is named.
    handles = [
        module.register_forward_hook(watch(name or type(model).__name__))
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            forward()
    except FloatingPointError:  # what the model itself says of NaN comes after a module's output
        pass
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _is_finite(output: Any) -> bool:
    if isinstance(output, Tensor):
        return not output.is_floating_point() or bool(torch.isfinite(output).all())
    if isinstance(output, dict):
        return all(_is_finite(value) for value in output.values())
    if isinstance(output, list | tuple):
        return all(_is_finite(value) for value in output)
    return True
