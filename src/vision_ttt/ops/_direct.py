"""Which calls may go straight to a kernel: those that PyTorch's dispatcher would hand on untouched.

A custom op written in Python costs tens of microseconds on its way through the dispatcher, which
between two products of a small image is most of a call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)

# What the dispatcher is told to look at beside the arguments' own keys, outside of inference mode
# and in it. Dispatch modes, tracers and torch.func transforms add keys of their own.
_INFERENCE = DispatchKeySet(DispatchKey.BackendSelect)
_NOBODY_LISTENS = frozenset(
    keys.raw_repr() for keys in (_INFERENCE, _INFERENCE.add(DispatchKey.ADInplaceOrView))
)


def may_go_straight(inputs: tuple[Any, ...]) -> bool:
    """Whether nobody but a kernel has to see a call: no autograd, autocast, tracer, mode, profiler.

    The inputs keep to the op's contract, and are on one device.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._dispatch_tls_local_include_set().raw_repr() not in _NOBODY_LISTENS
        or torch._C._is_any_autocast_enabled()
        or torch.autograd._profiler_enabled()
        or inputs[0].is_meta
    ):
        return False
    records = torch.is_grad_enabled()
    for x in inputs:
        if isinstance(x, Tensor) and (
            type(x) not in _PLAIN_TYPES
            or (records and x.requires_grad)
            or x.is_neg()  # a view that PyTorch has yet to negate, or zeros without memory
            or x._is_zerotensor()
        ):
            return False
    return True
