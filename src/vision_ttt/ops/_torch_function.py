"""``__torch_function__`` for the ops: tracers and tensor subclasses receive an op as one call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.overrides import handle_torch_function, has_torch_function

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def overridable(op: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Call ``__torch_function__`` of the op's arguments first, as PyTorch's own functions do.

    ``torch.fx`` therefore records a call of the op as one node and does not trace its branches.
    """

    @functools.wraps(op)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        relevant = (*args, *kwargs.values())
        if has_torch_function(relevant):
            return handle_torch_function(call, relevant, *args, **kwargs)
        return op(*args, **kwargs)

    return call
