"""The calls that may bypass PyTorch's dispatcher: those that it would pass on unchanged.

A custom op written in Python spends tens of microseconds in the dispatcher. For small images that
is most of a call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops._backend import is_transformed

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)

HAS_QUERIES = (
    all(
        hasattr(torch._C, name)
        for name in ("_len_torch_dispatch_stack", "_is_tracing", "_is_any_autocast_enabled")
    )
    and hasattr(torch.autograd, "_profiler_enabled")
    and hasattr(Tensor, "_is_zerotensor")
    and hasattr(torch._C._functorch, "is_legacy_batchedtensor")
)
"""Whether this PyTorch has the private queries below. Without them every call is dispatched."""


def is_plain_mode() -> bool:
    """Whether no autocast, tracer, transform, mode or profiler is active."""
    return HAS_QUERIES and not (
        torch.compiler.is_compiling()
        or is_transformed()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
        or torch._C._is_any_autocast_enabled()
        or torch.autograd._profiler_enabled()
    )


def are_plain(inputs: tuple[Any, ...]) -> bool:
    """Whether all tensors among the inputs are ones that the dispatcher passes on unchanged."""
    return not any(
        isinstance(x, Tensor)
        and (
            type(x) not in _PLAIN_TYPES
            or x.is_meta
            or x.is_neg()  # a view that PyTorch has yet to negate
            or x._is_zerotensor()  # zeros without memory
            or torch._C._functorch.is_legacy_batchedtensor(x)  # gradients for is_grads_batched
        )
        for x in inputs
    )


def is_plain_call(inputs: tuple[Any, ...]) -> bool:
    """Whether a call needs only a kernel, or autograd: a plain mode and plain tensors.

    The inputs must have passed the op's contract.
    """
    return is_plain_mode() and are_plain(inputs)


def signature(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a contract, :func:`are_plain` and the backends look at, but for strides.

    In a plain mode calls of the same signature are accepted, and served, or refused alike.
    """
    return tuple(
        [
            (
                *(type(x), x.shape, x.dtype, x.layout, x.device, x.is_neg(), x._is_zerotensor()),
                torch._C._functorch.is_legacy_batchedtensor(x),
            )
            if isinstance(x, Tensor)
            else (type(x), x)
            for x in inputs
        ]
    )


def needs_gradient(inputs: tuple[Any, ...]) -> bool:
    """Whether autograd is to record a call."""
    return torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in inputs
    )


def may_bypass_dispatcher(inputs: tuple[Any, ...]) -> bool:
    """Whether a call needs only a kernel: a plain call without a gradient."""
    return is_plain_call(inputs) and not needs_gradient(inputs)
