"""Where in a model NaN or infinity first appears."""

from collections.abc import Callable, Mapping
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
    # By the weights first: where an update made them so, the next module's output is a symptom.
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            return f"parameter {name!r}"
    found = _first_output(model, forward)
    if found is not None:
        return f"the output of module {found!r}"
    # Gradients flow from the loss to the input, so the last parameter's appeared first.
    for name, weight in reversed(list(model.named_parameters())):
        if weight.grad is not None and not torch.isfinite(weight.grad).all():
            return f"the gradient of parameter {name!r}"
    return "the loss or the gradient's norm"


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
