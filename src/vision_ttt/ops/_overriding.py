"""What other software may put in an op's place: tracers and subclasses of tensors see one call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.overrides import handle_torch_function, has_torch_function

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def overridable(op: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let ``__torch_function__`` of the op's arguments decide, as PyTorch's own functions do.

    So ``torch.fx`` records a call of the op as one node and does not look at its branches.
    """

    @functools.wraps(op)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        relevant = (*args, *kwargs.values())
        if has_torch_function(relevant):
            return handle_torch_function(call, relevant, *args, **kwargs)
        return op(*args, **kwargs)

    return call
