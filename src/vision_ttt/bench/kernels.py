"""Which fused kernels a model really runs: labels promise them, this looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from vision_ttt.bench.op_contenders import KERNELS
from vision_ttt.ops._backend import AUTO
from vision_ttt.ops._table import TABLE

ATTENTION = "attention by "
"""How the names of attention kernels begin."""

_ATTENTION = "aten::_scaled_dot_product_"
_OURS = "vision_ttt::"
_BACKEND_PLACE = -1  # of the arguments of an op with several backends


class _Recorder(TorchDispatchMode):
    """Remembers the fused operations that pass."""

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
            self.seen.add(f"{op} by {_serving(op, args)}" if op in KERNELS else op)
        return func(*args, **(kwargs or {}))


def kernels_run(call: Callable[[], object]) -> list[str]:
    """Name the fused kernels that a call runs, each once, sorted.

    Attention with torch's name of the kernel, e.g. "attention by flash_attention" on a GPU,
    "attention by flash_attention_for_cpu"; attention that is composed of matrix products and a
    softmax has none. ttt_linear and ttt_mlp with their backend, e.g. "ttt_linear by cpu"; of the
    other ops of this library those that run by a kernel.

    Args:
        call: not in inference mode, where composed operations hide what they consist of, and not
            compiled.
    """
    with _Recorder() as recorder:
        call()
    return sorted(recorder.seen)


def _serving(op: str, args: tuple[Any, ...]) -> str:
    """The backend of a call of the custom op."""
    backend = args[_BACKEND_PLACE]
    if backend != AUTO:
        return backend
    # As the op does it when it runs.
    inputs = TABLE[op].inputs(*args[: TABLE[op].width])
    return next(name for name in KERNELS[op] if TABLE[op].refusal(name, inputs) is None)
