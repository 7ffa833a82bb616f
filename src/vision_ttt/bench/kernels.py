"""The fused kernels that a model runs, recorded during a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from vision_ttt.ops._backend import AUTO
from vision_ttt.ops._table import TABLE

ATTENTION = "attention by "
"""The prefix of the names of attention kernels."""

_ATTENTION = "aten::_scaled_dot_product_"
_OURS = "vision_ttt::"
_BACKEND = "backend"  # the last argument of ops that take one


class _Recorder(TorchDispatchMode):
    """Records the names of fused operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name()
        if name.startswith(_ATTENTION):
            self.seen.add(ATTENTION + name.removeprefix(_ATTENTION))
        elif name.startswith(_OURS):
            op = name.removeprefix(_OURS)
            takes_one = func._schema.arguments[-1].name == _BACKEND
            self.seen.add(f"{op} by {_backend_of(op, args)}" if takes_one else op)
        return func(*args, **(kwargs or {}))


def kernels_run(call: Callable[[], object]) -> list[str]:
    """Return the names of the fused kernels that a call runs, each once, sorted.

    - Attention has torch's name of the kernel, e.g. "attention by flash_attention" on a GPU or
      "attention by flash_attention_for_cpu". Attention that is composed of matrix products and a
      softmax has no name.
    - Ops that take a backend as argument, one of them PyTorch's operations, have its name, e.g.
      "ttt_linear by cpu" or "selective_scan by dual".
    - The other ops of this library are included where a kernel computes them.

    Args:
        call: must be neither compiled nor in inference mode, which hides the operations within
            composed ones.
    """
    with _Recorder() as recorder:
        call()
    return sorted(recorder.seen)


def _backend_of(op: str, args: tuple[Any, ...]) -> str:
    """The backend of a call of the custom op."""
    backend = args[-1]
    if backend != AUTO:
        return backend
    return TABLE[op].choose(TABLE[op].inputs(*args[: TABLE[op].width]), running=True)
