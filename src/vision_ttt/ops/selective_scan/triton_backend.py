"""selective_scan on a GPU: the supported inputs, the segments and the launches of both passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops import _triton
from vision_ttt.ops._native import contiguous_last
from vision_ttt.ops._op import Backend
from vision_ttt.ops.selective_scan.contract import CHUNK_TOKENS, Inputs, num_chunks, num_groups

MOST_STATES = 256
"""The largest N that the kernels support."""
TILE_NUMBERS = 512
"""Numbers of a program's state, 16 per thread of its one warp: 32 channels for N = 16.

With fewer, sums over channels take more exchanges between threads; with more, registers spill."""
MOST_CHANNELS = 64
"""Channels of a program for small N."""
TILE_TOKENS = 2
"""Tokens whose states the backward kernel holds in registers at a time; with four of them, and a
state of 16 numbers, registers spill."""
WARPS_PER_PROCESSOR = 8
"""Programs per multiprocessor below which the sequence is split into segments.

Eight of the backward kernel's share the registers of one."""


def no_room(a: Tensor) -> str | None:
    """The reason why a program cannot hold the states of A [D, N], or None if it can."""
    if a.shape[1] <= MOST_STATES:
        return None
    return f"a state of {a.shape[1]} numbers per channel is over {MOST_STATES}"


def refusal(inputs: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    return no_room(inputs.A) or _triton.refusal(*inputs[:9], may_be_empty=True)


def _processors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1


def _segment_tokens(programs: int, length: int, processors: int) -> int:
    """Tokens of a segment: a multiple of a chunk, or all tokens, where the programs suffice.

    With segments the recurrence is computed twice, so that two of them gain nothing.
    """
    chunks = num_chunks(length)
    wanted = min(chunks, WARPS_PER_PROCESSOR * processors // max(1, programs))
    return (-(-chunks // wanted) if wanted > 2 else chunks) * CHUNK_TOKENS


class _Call:
    """One call's tensors in the form that the kernels read, and the arguments of all kernels."""

    def __init__(self, inputs: Inputs) -> None:
        u, delta, a, b, c, skip, z, bias, initial, self.softplus, reverse_channels = inputs
        self.u, self.delta, self.b, self.c = (contiguous_last(x) for x in (u, delta, b, c))
        self.z = None if z is None else contiguous_last(z)
        self.a, self.skip, self.bias, self.initial = (
            None if x is None else x.float().contiguous() for x in (a, skip, bias, initial)
        )
        self.images, self.length, self.channels = u.shape
        self.n, self.groups = a.shape[1], num_groups(b)
        states = 1 << (self.n - 1).bit_length()
        block = min(MOST_CHANNELS, TILE_NUMBERS // states)
        forward_channels = self.channels - reverse_channels
        runs = (forward_channels, reverse_channels)  # of channels alike, see locate
        if self.groups > 1:
            runs = (self.channels // self.groups,) * self.groups
        self.blocks = sum(-(-run // block) for run in runs)
        programs = self.images * self.blocks
        self.segment = _segment_tokens(programs, self.length, _processors(u))
        self.segments = -(-self.length // self.segment)
        self.grid = (self.images, self.blocks, self.segments)
        self.sizes = (self.length, self.channels, forward_channels, self.groups, self.segment)
        self.tile = {"N": self.n, "STATES": states, "CHANNELS": block}

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.u.new_empty(shape, dtype=dtype)

    def run(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        """Launch a kernel whose programs scan segments of blocks of channels."""
        if self.images:
            kernel[self.grid](
                *arguments,
                *self.sizes,
                **(self.tile | constants),
                SOFTPLUS=self.softplus,
                num_warps=1,
                num_stages=1,
                enable_fp_fusion=True,
            )

    def states_between(self, x: Tensor, first: Tensor | None, *, backward: bool) -> Tensor | None:
        """The state before each segment [S, B, D, N], or the gradient of that after each.

        Args:
            x: u, or the gradient of y.
            first: the state before all tokens, None for zeros; or the gradient of the last one.
            backward: whether it is the gradient.
        """
        from vision_ttt.ops.selective_scan.triton_segments import carry_kernel, shares_kernel

        if self.segments == 1:
            return first
        size = (self.images, self.channels)
        shares, starts = (self.empty(self.segments, *size, self.n) for _ in range(2))
        sums = self.empty(self.segments, *size)
        rows, z = (self.c, self.z) if backward else (self.b, None)
        self.run(
            shares_kernel,
            *(x, self.delta, rows, self.a, z, self.bias, shares, sums),
            *(_strides(x), _strides(self.delta), _row_strides(rows), _strides(z)),
            BACKWARD=backward,
        )
        block, states = 64, starts[0].numel()
        if states:
            carry_kernel[(-(-states // block),)](
                *(shares, sums, self.a, first, starts),
                *(self.channels * self.n, states, self.segments),
                **{"N": self.n, "BLOCK": block, "SEGMENTS": 16, "BACKWARD": backward},
                num_warps=4,
                num_stages=1,
                enable_fp_fusion=True,
            )
        return starts


def _strides(x: Tensor | None) -> tuple[int, int]:
    """Of x [B, T, D] without its last axis."""
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def _row_strides(x: Tensor) -> tuple[int, int, int]:
    """Of B or C [B, T, N] or [B, T, G, N]: image, token, group."""
    return (x.stride(0), x.stride(1), x.stride(2) if x.ndim == 4 else 0)


def selective_scan_triton(inputs: Inputs, save_states: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Forward pass. Arguments and results are those of :func:`selective_scan_dual`."""
    from vision_ttt.ops.selective_scan.triton_forward import forward_kernel

    call = _Call(inputs)
    u, b, c, z = call.u, call.b, call.c, call.z
    y = call.empty(*u.shape, dtype=u.dtype)
    last = call.empty(call.images, call.channels, call.n)
    kept = call.empty(num_chunks(call.length) if save_states else 0, *last.shape)
    with torch.cuda.device_of(u):
        starts = call.states_between(u, call.initial, backward=False)
        call.run(
            forward_kernel,
            *(u, call.delta, call.a, b, c, call.skip, z, call.bias, starts, y, last),
            kept if save_states else None,
            *(_strides(u), _strides(call.delta), _strides(z), _row_strides(b), _row_strides(c)),
            CHUNK=CHUNK_TOKENS,
        )
    return y, last, kept


def selective_scan_triton_backward(
    inputs: Inputs, grad_y: Tensor, grad_state: Tensor, kept: Tensor
) -> tuple[Tensor, ...]:
    """Backward pass. Arguments and results are those of :func:`selective_scan_dual_backward`."""
    from vision_ttt.ops.selective_scan.triton_backward import backward_kernel

    call = _Call(inputs)
    u, b, c, z = call.u, call.b, call.c, call.z
    grad, kept = contiguous_last(grad_y.to(u.dtype)), kept.float().contiguous()
    grad_state = grad_state.float().contiguous()
    du, ddelta = (call.empty(*u.shape, dtype=u.dtype) for _ in range(2))
    dz = None if z is None else call.empty(*u.shape, dtype=u.dtype)
    dstate = call.empty(*grad_state.shape)
    # Every program writes its own shares; PyTorch sums them in a fixed order.
    db, dc = (call.empty(call.blocks, call.images, call.length, call.n) for _ in range(2))
    places = call.segments * call.images
    da = call.empty(places, call.channels, call.n)
    dskip, dbias = (
        None if x is None else call.empty(places, call.channels) for x in (call.skip, call.bias)
    )
    # The states before a chunk's tiles of tokens, for the program that works on it.
    states = call.tile["CHANNELS"] * call.n
    scratch = call.empty(*call.grid, CHUNK_TOKENS // TILE_TOKENS, states)
    with torch.cuda.device_of(u):
        ends = call.states_between(grad, grad_state, backward=True)
        call.run(
            backward_kernel,
            *(grad, ends, u, call.delta, call.a, b, c, call.skip, z, call.bias, kept, scratch),
            *(du, ddelta, dz, db, dc, da, dskip, dbias, dstate),
            *(_strides(grad), _strides(u), _strides(call.delta), _strides(z)),
            *(_row_strides(b), _row_strides(c)),
            CHUNK=CHUNK_TOKENS,
            TILE=TILE_TOKENS,
        )

    def of_rows(shares: Tensor, like: Tensor) -> Tensor:
        """Of B or C, from the shares of blocks of channels."""
        total = shares.unflatten(0, (call.groups, -1)).sum(1)  # [G, B, T, N]
        return total.permute(1, 2, 0, 3).reshape(like.shape).to(like.dtype).contiguous()

    def summed(shares: Tensor | None, like: Tensor | None) -> Tensor:
        if shares is None or like is None:
            return u.new_empty(0)
        return shares.sum(0).to(like.dtype)

    return (
        du,
        ddelta,
        summed(da, inputs.A),
        of_rows(db, inputs.B),
        of_rows(dc, inputs.C),
        summed(dskip, inputs.D),
        u.new_empty(0) if dz is None else dz,
        summed(dbias, inputs.delta_bias),
        summed(dstate.unsqueeze(0), inputs.initial_state),
    )


BACKEND = Backend(selective_scan_triton, selective_scan_triton_backward, refusal)
