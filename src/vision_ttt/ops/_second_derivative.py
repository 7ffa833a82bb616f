"""Derivatives of a backward pass, for gradient penalties: those of the op's definition.

The kernels compute an op and its gradient. Whoever asks for the gradient's own graph
(``create_graph=True``) gets the kernels' gradient, and its derivative by automatic differentiation
of the definition: any number of times, at the definition's cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Definition = Callable[..., Tensor | tuple[Tensor, ...]]


def derive_twice(
    backward_op: Any, definition: Definition, *, tensors: int, results: int = 1, unused: int = 0
) -> None:
    """Register the derivative of ``backward_op``.

    Args:
        backward_op: the custom op (gradients of the results, the op's tensors, ``unused`` further
            tensors, options) → a gradient per tensor of the op, of any shape where it was None.
        definition: (the op's tensors, options) → its result, or a tuple of results, by
            differentiable operations.
        tensors: how many tensors the op takes; each may be None.
        results: how many results have a gradient.
        unused: how many tensors more the backward pass takes to save work.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[: results + tensors])
        ctx.options = inputs[results + tensors + unused :]
        ctx.count = len(inputs)

    def derivative(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        grads, inputs = ctx.saved_tensors[:results], ctx.saved_tensors[results:]
        given = [i for i, x in enumerate(inputs) if x is not None]

        def gradient(grads: Sequence[Tensor], present: Sequence[Tensor]) -> tuple[Tensor, ...]:
            def op(*present: Tensor) -> Tensor | tuple[Tensor, ...]:
                arguments: list[Tensor | None] = [None] * tensors
                for i, x in zip(given, present, strict=True):
                    arguments[i] = x
                return definition(*arguments, *ctx.options)

            _, pull_back = torch.func.vjp(op, *present)
            return pull_back(tuple(grads) if results > 1 else grads[0])

        present = tuple(inputs[i] for i in given)
        _, pull_back = torch.func.vjp(gradient, tuple(grads), present)
        of_grads, of_present = pull_back(tuple(cotangents[i] for i in given))
        of_inputs: list[Tensor | None] = [None] * tensors
        for i, x in zip(given, of_present, strict=True):
            of_inputs[i] = x
        rest = [None] * (ctx.count - results - tensors)
        return *of_grads, *of_inputs, *rest

    backward_op.register_autograd(derivative, setup_context=setup_context)
