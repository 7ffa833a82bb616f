"""What the learner ops' launches of Triton kernels share; the kernels are in the ops' folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops import _triton
from vision_ttt.ops._learner_dual import checkpoint_interval, initial_state, uniform
from vision_ttt.ops._learner_scan_order import in_scan_order
from vision_ttt.ops._native import contiguous_last

DIMENSIONS = (16, 32, 64, 128)
"""Head dimensions d that the kernels support."""
TILE = 16
"""Tokens of a tile: the fewest that tensor cores support. A larger mini-batch has several tiles."""


def refusal(inputs: Any) -> str | None:
    """The reason why the kernels do not support a learner's inputs, or None if they do."""
    q = inputs.q
    if q.shape[-1] not in DIMENSIONS:
        return f"head dimension {q.shape[-1]} is not one of {DIMENSIONS}"
    return _triton.refusal(q, may_be_empty=True)


def constants(
    dtype: torch.dtype, dim: int, mini_batch_size: int, norm: bool = True
) -> dict[str, Any]:
    """The compile-time constants of the kernels; see ttt_linear's README on precision."""
    import triton.language as tl

    exact = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
    exact |= dtype == torch.float16 and not norm
    operand = tl.bfloat16 if dtype == torch.bfloat16 else tl.float32
    several = mini_batch_size > TILE
    return {"DIM": dim, "TILE": TILE, "SEVERAL": several, "OPERAND": operand, "PARTS": 1 + exact}


class LearnerCall:
    """One call's tensors in the form that the kernels read, and the arguments of all kernels.

    ``others`` are eta, the initial state, the norm's weight and bias, and the position scale.
    """

    def __init__(self, inputs: Any) -> None:
        q, k, v, *others, mini_batch_size, reverse_heads, _ = inputs
        batch, length, heads, dim = q.shape
        state = others[1:-3] = uniform(initial_state(inputs), batch)
        self.views = [contiguous_last(x) for x in (q, k, v)]
        self.strides = [x.stride()[:3] for x in self.views]
        self.others = [None if x is None else x.float().contiguous() for x in others]
        scale = self.others[-1]
        self.programs = batch * heads
        self.state_batch = heads if self.others[1].ndim == 4 else 0
        self.state_shapes = [x.shape[-n:] for x, n in zip(state, (2, 1) * 2, strict=False)]
        self.scale_head = 0 if scale is None or scale.ndim == 1 else mini_batch_size
        # A size beyond the length has the same result as the length, which fits the kernels' ints.
        mini_batch_size = min(mini_batch_size, length)
        interval = checkpoint_interval(dim, mini_batch_size, len(state) // 2)
        self.sizes = (length, heads, reverse_heads, mini_batch_size, interval)
        self.kind = constants(q.dtype, dim, mini_batch_size, inputs.ln_weight is not None)
        self.device = q.device

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def states(self, *lead: int) -> list[Tensor]:
        """Uninitialised tensors of the shapes of a state, with the axes ``lead`` in front."""
        return [self.empty(*lead, *shape) for shape in self.state_shapes]


def of_positions(x: Tensor, last: Tensor, mini_batch_size: int, reverse_heads: int) -> Tensor:
    """Sum the shares of tokens [B, T, H] and of mini-batches [B, H, M] to [B, H, positions]."""
    length = x.shape[1]
    x = in_scan_order(x, reverse_heads).transpose(1, 2)
    x = torch.nn.functional.pad(x, (0, -length % mini_batch_size))
    x = x.unflatten(2, (last.shape[-1], mini_batch_size)).sum(2)
    whole = length // mini_batch_size
    x[..., -1] += last[..., :whole].sum(-1)
    x[..., (length - 1) % mini_batch_size] += last[..., whole:].sum(-1)
    return x


def run_part(
    launch: Callable[..., None],
    inputs: Any,
    sums: Sequence[Tensor],
    position: int | Tensor,
    return_state: bool,
) -> list[Tensor]:
    """Run tokens of one mini-batch that is open, a tile per launch.

    Arguments and results are those of :meth:`vision_ttt.ops._learner_cpu.LearnerCall.part`.

    Args:
        launch: runs the op's kernel, given the call and the kernel's arguments.
    """
    q, size = inputs.q, inputs.mini_batch_size
    call = LearnerCall(inputs)
    batch, length, heads, _ = q.shape
    each = isinstance(position, Tensor)
    positions, position = (position, 0) if each else (None, position)
    full = not each and position + length == size
    none = [None] * len(sums)
    given = [x.float().contiguous() for x in sums] if each or position else none
    o = call.empty(*q.shape, dtype=q.dtype)
    wanted = return_state, return_state and not full, return_state and each
    last, after, following = (call.states(batch, heads) if x else none for x in wanted)
    eta, *others = call.others
    for begin in range(0, length, TILE):
        tokens = min(TILE, length - begin)
        ends = begin + tokens == length
        to = after if ends else call.states(batch, heads) if begin == 0 else given
        with torch.cuda.device_of(q):
            launch(
                call,
                *(x[:, begin:] for x in (*call.views, eta)),
                *(*others, positions, *given, o[:, begin:]),
                *(last if ends else none),
                *(*to, *following, *call.strides, call.state_batch, call.scale_head),
                *(length, heads, tokens, position + begin, size, inputs.eps),
            )
        given = to
    return [o, *(x for x in (*last, *after, *following) if x is not None)]
