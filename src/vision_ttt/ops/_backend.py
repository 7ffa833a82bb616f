"""Which backend serves an op: the request of a call, an override, or the fastest that can.

Precedence, highest first: the ``backend=`` argument of the call, the innermost :func:`use_backend`
block, the environment variable ``VISION_TTT_BACKEND``, and last the op's own order of preference.
A backend that was asked for and cannot serve raises; only the last rule ever chooses by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

ENVIRONMENT_VARIABLE = "VISION_TTT_BACKEND"

# Plain module state and not a ContextVar: torch.compile guards on it, so that code compiled under
# one override is compiled again, and not reused, under another.
_override: str | None = os.environ.get(ENVIRONMENT_VARIABLE) or None
_override_source = f"the environment variable {ENVIRONMENT_VARIABLE}"

Refusal = Callable[[], str | None]
"""Says in a few words why a backend cannot serve a call, or None if it can."""


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Run every op inside the block with the backend ``name``.

    None lifts any override, the environment variable's too, so that each op picks for itself.
    The override holds for all threads of the process.

    Example:
        >>> with use_backend("reference"):
        ...     logits = model(images)
    """
    global _override, _override_source
    before = _override, _override_source
    _override, _override_source = name, "use_backend()"
    try:
        yield
    finally:
        _override, _override_source = before


def resolve_backend(op: str, requested: str | None, refusals: Mapping[str, Refusal]) -> str:
    """Name the backend that serves one call of ``op``.

    Args:
        op: the op's public name, for error messages.
        requested: the call's ``backend`` argument.
        refusals: for each backend of the op, fastest first, a function that returns None if the
            backend can serve this call and otherwise the reason why not.

    Raises:
        ValueError: the backend asked for is unknown or cannot serve this call.
    """
    name, source = (requested, "backend=") if requested else (_override, _override_source)
    if name is not None:
        if name not in refusals:
            raise ValueError(
                f"{op}: unknown backend {name!r} (from {source}); available: {sorted(refusals)}"
            )
        reason = refusals[name]()
        if reason is not None:
            raise ValueError(f"{op}: backend {name!r} (from {source}) cannot serve: {reason}")
        return name
    for candidate, refusal in refusals.items():
        if refusal() is None:
            return candidate
    reasons = {candidate: refusal() for candidate, refusal in refusals.items()}
    raise ValueError(f"{op}: no backend can serve this call: {reasons}")
