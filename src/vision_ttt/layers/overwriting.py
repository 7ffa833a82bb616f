"""When a layer may reuse the memory of an intermediate result."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def may_overwrite(*producers: nn.Module) -> bool:
    """Whether nobody looks at these modules' outputs again: neither autograd nor a forward hook.

    Compiled code is left alone: it plans its memory itself.
    """
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or nn.modules.module._global_forward_hooks
        or any(producer._forward_hooks for producer in producers)
    )


def add_residual(branch: Tensor, x: Tensor, *producers: nn.Module) -> Tensor:
    """x + branch, in the memory of the branch that ``producers`` made where that is allowed."""
    # Under autocast the branch is of lower precision than the sum.
    if branch.dtype == x.dtype and may_overwrite(*producers):
        return branch.add_(x)
    return x + branch
