"""Gradient checkpointing for functions that use torch.func inside.

PyTorch's own checkpointing uses hooks on saved tensors, which torch.func does not support.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from vision_ttt.ops.vit3_ttt.descent import without_autocast


class _Checkpointed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        # Inputs are detached: an output that requires a gradient depends on a captured tensor.
        with torch.enable_grad():
            outputs = function(*(x.detach() for x in tensors))
        if any(x.requires_grad for x in outputs):
            raise ValueError(
                "checkpointing: the inner model or loss uses a tensor that requires a gradient and "
                "is not among its arguments; pass it in state or outer"
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
        with without_autocast(ctx.saved_tensors[0]):  # as in the forward pass
            with torch.enable_grad():
                outputs = ctx.function(*inputs)
            reached = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
            if not reached:  # no output depends on the inputs that need a gradient
                return None, *(None for _ in needed)
            outputs, grads = zip(*reached, strict=True)
            gradients = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
        return None, *(next(gradients) if need else None for need in needed)


def checkpointed(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``; the backward pass calls the function again instead of keeping more.

    Arguments and results are tensors, or tuples and dictionaries of tensors. The function must draw
    no random numbers. The result is differentiable once.

    Raises:
        ValueError: the function uses a tensor that requires a gradient and is not an argument; its
            gradient would be lost.
    """
    tensors, structure = tree_flatten(arguments)
    result_structure = None

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal result_structure
        results, result_structure = tree_flatten(function(*tree_unflatten(tensors, structure)))
        return tuple(results)

    results = _Checkpointed.apply(flat, *tensors)
    return tree_unflatten(results, result_structure)
