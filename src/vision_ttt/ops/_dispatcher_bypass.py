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
)
"""Whether this PyTorch has the private queries below. Without them every call is dispatched."""


def may_bypass_dispatcher(inputs: tuple[Any, ...]) -> bool:
    """Whether a call needs only a kernel: no autograd, autocast, tracer, mode or profiler.

    The inputs must have passed the op's contract.
    """
    if (
        not HAS_QUERIES
        or torch.compiler.is_compiling()
        or is_transformed()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
        or torch._C._is_any_autocast_enabled()
        or torch.autograd._profiler_enabled()
    ):
        return False
    records = torch.is_grad_enabled()
    for x in inputs:
        if isinstance(x, Tensor) and (
            type(x) not in _PLAIN_TYPES
            or (records and x.requires_grad)
            or x.is_meta
            or x.is_neg()  # a view that PyTorch has yet to negate
            or x._is_zerotensor()  # zeros without memory
        ):
            return False
    return True
