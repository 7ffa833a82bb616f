"""The choice of an op's backend: requested by a call, set by an override, or the fastest.

Precedence, highest first: the ``backend=`` argument of the call, the innermost :func:`use_backend`
block, the environment variable ``VISION_TTT_BACKEND``, and last the op's own order of preference.
A requested backend that does not support the call raises an error. The import of the package raises
an error if the variable names no backend. Only the last rule falls back to another backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad

from vision_ttt import environment

ENVIRONMENT_VARIABLE = "VISION_TTT_BACKEND"
"""The environment variable that overrides the backend of every op."""
BACKENDS = ("cpu", "triton", "dual", "reference")
"""The names of all ops' backends."""
AUTO = "auto"
"""The name that requests no backend: the op selects the fastest when it runs."""
REFERENCE = "reference"
"""The backend that every op has: its definition, differentiated by autograd."""
PYTORCH = ("dual", REFERENCE)
"""The names that select PyTorch's own operations. An op without a dual form accepts both."""

BY_CALL = "backend="
"""The source of a request that is not an override."""

# Plain module state and not a ContextVar: torch.compile guards on it, so that code compiled under
# one override is compiled again, and not reused, under another.
_override: str | None = environment.one_of(ENVIRONMENT_VARIABLE, BACKENDS)
_override_source = f"the environment variable {ENVIRONMENT_VARIABLE}"
_outside = _override, _override_source
_blocks: list[list[str | None]] = []  # [name] of each use_backend block that is open, oldest first


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Run every op inside the block with the backend ``name``.

    None removes every override, the environment variable's too, so that each op selects its own
    backend. The override applies to all threads of the process. If blocks overlap in several
    threads, the open block that was entered last applies.

    Example:
        >>> with use_backend("reference"):
        ...     logits = model(images)
    """
    block = [name]  # an object of its own, so that equal names stay distinct
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
    """The backend that the innermost block or the environment variable sets, or None."""
    return _override


def is_transformed() -> bool:
    """Whether forward-mode derivatives or a torch.func transform (grad, vmap, …) are active.

    They trace PyTorch's operations inside a function. A kernel contains none, so a forward-mode
    derivative through it would silently be zero.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def autocast_kind(x: Tensor) -> str:
    """The device type whose autocast setting applies to x: "cpu" for a meta tensor."""
    return "cpu" if x.is_meta else x.device.type


def exporting_onnx() -> bool:
    """Whether torch.onnx.export is tracing. Its graphs contain PyTorch's own operations only."""
    return torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export()


def written_out() -> bool:
    """Whether an exporter is tracing a program of PyTorch's own operations."""
    return exporting_onnx() or (torch.compiler.is_exporting() and _override in PYTORCH)


def requested(backend: str | None) -> tuple[str | None, str]:
    """The backend that the call or else an override requests, and the source of the request."""
    return (backend, BY_CALL) if backend else (_override, _override_source)
