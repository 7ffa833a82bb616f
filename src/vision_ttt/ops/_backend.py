"""Which backend serves an op: the request of a call, an override, or the fastest that can.

Precedence, highest first: the ``backend=`` argument of the call, the innermost :func:`use_backend`
block, the environment variable ``VISION_TTT_BACKEND``, and last the op's own order of preference.
A backend that was asked for and cannot serve raises; only the last rule ever chooses by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd import forward_ad

ENVIRONMENT_VARIABLE = "VISION_TTT_BACKEND"
AUTO = "auto"
"""No backend asked for: the op takes the fastest when it runs."""

# Plain module state and not a ContextVar: torch.compile guards on it, so that code compiled under
# one override is compiled again, and not reused, under another.
_override: str | None = os.environ.get(ENVIRONMENT_VARIABLE) or None
_override_source = f"the environment variable {ENVIRONMENT_VARIABLE}"
_outside = _override, _override_source
_blocks: list[list[str | None]] = []  # [name] of each use_backend block that is open, oldest first

Refusal = Callable[[str], str | None]
"""Says in a few words why the backend of a name cannot serve a call, or None if it can."""


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Run every op inside the block with the backend ``name``.

    None lifts any override, the environment variable's too, so that each op picks for itself.
    The override holds for all threads of the process; of blocks that overlap in several threads,
    the one entered last among those still open wins.

    Example:
        >>> with use_backend("reference"):
        ...     logits = model(images)
    """
    block = [name]  # an object of its own, so that equal names are told apart
    _blocks.append(block)
    _apply_innermost()
    try:
        yield
    finally:
        _blocks[:] = [other for other in _blocks if other is not block]
        _apply_innermost()


def _apply_innermost() -> None:
    global _override, _override_source
    _override, _override_source = (_blocks[-1][0], "use_backend()") if _blocks else _outside


def override() -> str | None:
    """The backend that the innermost block or the environment asks for."""
    return _override


def is_transformed() -> bool:
    """Whether forward-mode derivatives or a torch.func transform (grad, vmap, …) are at work.

    They look inside a function, where the kernels have nothing to see: a forward derivative through
    them would be zero, silently.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def exporting_onnx() -> bool:
    """Whether torch.onnx.export traces: its graphs hold PyTorch's own operations only."""
    return torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export()


def requested_backend(
    op: str, requested: str | None, names: Iterable[str], refusal: Refusal
) -> str:
    """Name the backend asked for by a call of ``op`` or by an override, or AUTO if none is.

    Args:
        op: the op's public name, for error messages.
        requested: the call's ``backend`` argument.
        names: the op's backends.
        refusal: why the backend of a name cannot serve this call.

    Raises:
        ValueError: the backend asked for is unknown or cannot serve this call.
    """
    name, source = (requested, "backend=") if requested else (_override, _override_source)
    if name is None:
        return AUTO
    if name not in names:
        raise ValueError(
            f"{op}: unknown backend {name!r} (from {source}); available: {sorted(names)}"
        )
    reason = refusal(name)
    if reason is not None:
        raise ValueError(f"{op}: backend {name!r} (from {source}) cannot serve: {reason}")
    return name
