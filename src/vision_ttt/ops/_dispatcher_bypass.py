"""Bypasses PyTorch's dispatcher for calls that the dispatcher would pass on unchanged.

A custom op in Python and its derivative spend more than a hundred microseconds per call in the
dispatcher. For small images, this is most of the time of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops import _backend
from vision_ttt.ops._backend import autocast_kind
from vision_ttt.ops._registration import Declaration

is_legacy_batchedtensor = getattr(torch._C._functorch, "is_legacy_batchedtensor", None)
HAS_QUERIES = (
    all(
        hasattr(torch._C, name)
        for name in ("_len_torch_dispatch_stack", "_is_tracing", "_is_any_autocast_enabled")
    )
    and hasattr(torch.autograd, "_profiler_enabled")
    and hasattr(Tensor, "_is_zerotensor")
    and is_legacy_batchedtensor is not None
)
"""Whether this PyTorch has the private queries below. Without them every call is dispatched."""

_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))


def is_plain(inputs: Sequence[Any]) -> bool:
    """Whether a call needs only a kernel, autograd, or autocast.

    No override, tracer, transform, mode or profiler is active, and all tensors among the inputs are
    ones that the dispatcher passes on unchanged.
    """
    if (
        not HAS_QUERIES
        or torch.compiler.is_compiling()
        or _backend.override() is not None
        or _backend.is_transformed()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
        or torch.autograd._profiler_enabled()
    ):
        return False
    for x in inputs:  # a loop: any() would take twice the time
        if type(x) in _PLAIN_TYPES:
            if (
                x.is_meta
                or x.is_neg()  # a view that PyTorch has yet to negate
                or x._is_zerotensor()  # zeros without memory
                or is_legacy_batchedtensor(x)  # gradients for is_grads_batched
            ):
                return False
        elif isinstance(x, Tensor):
            return False
    return True


def autocast_is_on(x: Any) -> bool:
    """Whether autocast is on for the device of x; False if x is no tensor."""
    if not torch._C._is_any_autocast_enabled() or not isinstance(x, Tensor):
        return False
    return torch.is_autocast_enabled(autocast_kind(x))


def needs_gradient(inputs: Sequence[Any]) -> bool:
    """Whether autograd is to record a call."""
    if torch.is_grad_enabled():
        for x in inputs:
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


class RecordedCall(torch.autograd.Function):
    """The op's results, recorded by autograd: ``apply(op, name of its backend, *inputs)``.

    Each op has a subclass, under whose name its calls appear in autograd's graphs.
    """

    @staticmethod
    def forward(ctx: Any, op: Declaration, name: str, *inputs: Any) -> Any:
        keep = () if op.kept is None else (True,)
        results, kept = op.backends[name].forward(op.inputs(*inputs), *keep), ()
        if keep:
            results, kept = results[: op.results], results[op.results :]
            results = results if op.results > 1 else results[0]
        ctx.save_for_backward(*inputs[: op.tensors], *kept)
        ctx.op, ctx.backend, ctx.options = op, name, inputs[op.tensors :]
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        op, saved, options = ctx.op, ctx.saved_tensors, ctx.options
        # The gradient is differentiated again, a mode must intercept the backward op, or autocast
        # is on, which the backward op turns off.
        plain = not torch.is_grad_enabled() and is_plain((*grads, *saved))
        if not plain or autocast_is_on(saved[0]):
            name = (ctx.backend,) if op.backend_at_runtime else ()
            gradients = op.backward_op(*grads, *saved, *options, *name)
        else:
            op.backward_contract.check_storages((*grads, *saved))
            inputs = op.inputs(*saved[: op.tensors], *options)
            gradients = op.backends[ctx.backend].backward(inputs, *grads, *saved[op.tensors :])
        return None, None, *op.per_argument(saved, gradients), *[None] * len(options)
