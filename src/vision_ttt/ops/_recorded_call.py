"""Calls with a gradient that need nothing of PyTorch's dispatcher but autograd.

A custom op in Python and its derivative spend more than a hundred microseconds a call in the
dispatcher. Here autograd records the backend's own functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vision_ttt.ops import _backend
from vision_ttt.ops._dispatcher_bypass import is_plain_call

if TYPE_CHECKING:
    from vision_ttt.ops._op import Backend, Op


class RecordedCall(torch.autograd.Function):
    """The op's results, recorded by autograd: ``apply(op, backend, requested, *inputs)``.

    ``requested`` is the name by which a custom op finds the backend again.
    """

    @staticmethod
    def forward(ctx: Any, op: Op, backend: Backend, requested: str, *inputs: Any) -> Any:
        named = op.inputs(*inputs)
        if op.kept is None:
            results = backend.forward(named)
            kept = ()
        else:
            results = backend.forward(named, True)
            kept = results[op.results :]
            results = results[: op.results] if op.results > 1 else results[0]
        ctx.save_for_backward(*inputs[: op.tensors], *kept)
        ctx.op, ctx.backend, ctx.requested = op, backend, requested
        ctx.options = inputs[op.tensors :]
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        op, saved, options = ctx.op, ctx.saved_tensors, ctx.options
        # The gradient is differentiated again, or a mode wants to see it.
        if torch.is_grad_enabled() or _backend.override() or not is_plain_call((*grads, *saved)):
            backend = (ctx.requested,) if op.backend_at_runtime else ()
            gradients = op.backward_op(*grads, *saved, *options, *backend)
        else:
            op.backward_contract.check_storages((*grads, *saved))
            inputs = op.inputs(*saved[: op.tensors], *options)
            gradients = ctx.backend.backward(inputs, *grads, *saved[op.tensors :])
        gradients = gradients if op.tensors > 1 else (gradients,)
        pairs = zip(saved, gradients, strict=False)  # without the kept tensors
        return (
            None,
            None,
            None,
            *(None if x is None else grad for x, grad in pairs),
            *[None] * len(options),
        )


def recorded_call(name: str) -> type[RecordedCall]:
    """The class for one op, under whose name its calls appear in autograd's graphs."""
    return type(f"vision_ttt_{name}", (RecordedCall,), {})
