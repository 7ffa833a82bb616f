"""Gradient checkpointing for functions that use torch.func inside.

PyTorch's own checkpointing works by hooks on saved tensors, which torch.func refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.function = function
        ctx.device_type = tensors[0].device.type
        ctx.autocast = torch.is_autocast_enabled(ctx.device_type)
        ctx.save_for_backward(*tensors)
        with torch.enable_grad():  # inputs are cut off: what needs a gradient now came from outside
            outputs = function(*(x.detach() for x in tensors))
        if any(x.requires_grad for x in outputs):
            raise ValueError(
                "checkpointing: the inner model or loss uses a tensor that requires a gradient and "
                "is not among its arguments; hand it over in state or outer"
            )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [
            x.detach().requires_grad_(need)
            for x, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        wanted = [x for x in inputs if x.requires_grad]
        # Autocast as in the forward pass, whatever surrounds the call of backward().
        with torch.autocast(ctx.device_type, enabled=ctx.autocast):
            with torch.enable_grad():
                outputs = ctx.function(*inputs)
            reached = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
            outputs, grads = zip(*reached, strict=True)
            gradients = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
        return None, *(next(gradients) if need else None for need in needed)


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, keeping only the arguments: the rest is computed again.

    Arguments and results are tensors, or tuples and dictionaries of them; the function draws no
    random numbers. Differentiable once.

    Raises:
        ValueError: the function uses a tensor that requires a gradient and is not an argument: its
            gradient would be lost.
    """
    tensors, structure = tree_flatten(arguments)
    result_structure = None

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal result_structure
        results, result_structure = tree_flatten(function(*tree_unflatten(tensors, structure)))
        return tuple(results)

    results = _Recomputed.apply(flat, *tensors)
    return tree_unflatten(results, result_structure)
