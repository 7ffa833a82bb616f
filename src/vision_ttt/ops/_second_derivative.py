"""Derivatives of a backward pass, for gradient penalties: those of the op's definition.

The kernels compute an op and its gradient. With ``create_graph=True`` the gradient is the kernels',
and its derivatives, of any order, are those of the definition, at the definition's cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vision_ttt.ops._op import Op


def derive_twice(op: Op, backward_op: Any) -> None:
    """Register the derivative of ``backward_op``, the custom op of ``op``'s backward pass."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        grads, arguments, _ = op.split(inputs)
        ctx.save_for_backward(*grads, *arguments[: op.tensors])
        ctx.options = arguments[op.tensors :]
        ctx.count = len(inputs)

    def derivative(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: activation checkpointing allows a single read
        grads, inputs = saved[: op.results], saved[op.results :]
        given = [i for i, x in enumerate(inputs) if x is not None]

        def gradient(grads: Sequence[Tensor], present: Sequence[Tensor]) -> tuple[Tensor, ...]:
            def definition(*present: Tensor) -> Tensor | tuple[Tensor, ...]:
                arguments: list[Tensor | None] = [None] * op.tensors
                for i, x in zip(given, present, strict=True):
                    arguments[i] = x
                return op.definition(op.inputs(*arguments, *ctx.options))

            _, pull_back = torch.func.vjp(definition, *present)
            return pull_back(tuple(grads) if op.results > 1 else grads[0])

        present = tuple(inputs[i] for i in given)
        _, pull_back = torch.func.vjp(gradient, tuple(grads), present)
        of_grads, of_present = pull_back(tuple(cotangents[i] for i in given))
        of_inputs: list[Tensor | None] = [None] * op.tensors
        for i, x in zip(given, of_present, strict=True):
            of_inputs[i] = x
        return *of_grads, *of_inputs, *[None] * (ctx.count - op.results - op.tensors)

    backward_op.register_autograd(derivative, setup_context=setup_context)
