"""Whether a module may be passed over for an op that does the same."""

from __future__ import annotations

from torch import nn


def is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether calling ``module`` does what a ``kind`` does and nothing else."""
    return (
        type(module) is kind
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "forward" not in module.__dict__
    )
