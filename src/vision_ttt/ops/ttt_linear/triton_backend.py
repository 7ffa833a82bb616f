"""TTT-Linear on a GPU: the supported inputs and the launches of both passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops import _triton
from vision_ttt.ops._learner_dual import checkpoint_interval, num_checkpoints
from vision_ttt.ops._native import contiguous_last
from vision_ttt.ops._op import Backend
from vision_ttt.ops.ttt_linear.contract import Inputs

DIMENSIONS = (16, 32, 64, 128)
"""Head dimensions d that the kernels support."""
UNNORMED = (16, 32)
"""Those that they support without an inner norm: for larger ones ptxas 12.8, which comes with
Triton 3.6, compiles the backward pass wrongly (see this folder's README)."""
TILE = 16
"""Tokens of a tile: the fewest that tensor cores support. A larger mini-batch has several tiles."""


def refusal(inputs: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    q = inputs.q
    if q.shape[-1] not in DIMENSIONS:
        return f"head dimension {q.shape[-1]} is not one of {DIMENSIONS}"
    if inputs.ln_weight is None and q.shape[-1] not in UNNORMED:
        return f"without a norm, head dimension {q.shape[-1]} is not one of {UNNORMED}"
    return _triton.refusal(q, may_be_empty=True)


def _kind(dtype: torch.dtype, dim: int, mini_batch_size: int, norm: bool = True) -> dict[str, Any]:
    """The compile-time constants of the kernels; see this folder's README on precision."""
    import triton.language as tl

    exact = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
    exact |= dtype == torch.float16 and not norm
    operand = tl.bfloat16 if dtype == torch.bfloat16 else tl.float32
    several = mini_batch_size > TILE
    return {"DIM": dim, "TILE": TILE, "SEVERAL": several, "OPERAND": operand, "PARTS": 1 + exact}


class _Call:
    """One call's tensors in the form that the kernels read, and the arguments of all kernels."""

    def __init__(self, inputs: Inputs) -> None:
        q, k, v, *others, mini_batch_size, reverse_heads, _ = inputs
        self.views = [contiguous_last(x) for x in (q, k, v)]
        self.strides = [x.stride()[:3] for x in self.views]
        self.others = [None if x is None else x.float().contiguous() for x in others]
        _, w0, b0, _, _, scale = self.others
        batch, length, heads, dim = q.shape
        if w0.ndim != b0.ndim + 1:  # one has a batch axis, the other not
            w0 = self.others[1] = w0.expand(batch, heads, dim, dim).contiguous()
            self.others[2] = b0.expand(batch, heads, dim).contiguous()
        self.programs = batch * heads
        self.state_batch = heads if w0.ndim == 4 else 0
        self.scale_head = 0 if scale is None or scale.ndim == 1 else mini_batch_size
        # A size beyond the length means all tokens. The length fits the kernels' integers.
        mini_batch_size = min(mini_batch_size, length)
        interval = checkpoint_interval(dim, mini_batch_size)
        self.sizes = (length, heads, reverse_heads, mini_batch_size, interval)
        self.kind = _kind(q.dtype, dim, mini_batch_size, inputs.ln_weight is not None)
        self.device = q.device

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)


def ttt_linear_triton(
    inputs: Inputs, save_states: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Forward pass. Arguments and results are those of :func:`ttt_linear_dual`."""
    from vision_ttt.ops.ttt_linear import triton_forward

    q, mini_batch_size = inputs.q, inputs.mini_batch_size
    call = _Call(inputs)
    batch, length, heads, dim = q.shape
    count = num_checkpoints(length, dim, mini_batch_size) if save_states else 0
    o = call.empty(*q.shape, dtype=q.dtype)
    w, b = call.empty(batch, heads, dim, dim), call.empty(batch, heads, dim)
    kept_w = call.empty(count, batch, heads, dim, dim)
    kept_b = call.empty(count, batch, heads, dim)
    with torch.cuda.device_of(q):
        triton_forward.forward.launch(
            call.programs,
            *(*call.views, *call.others, o, w, b),
            *((kept_w, kept_b) if count else (None, None)),
            *(*call.strides, call.state_batch, call.scale_head, *call.sizes, inputs.eps),
            **call.kind,
        )
    return o, w, b, kept_w, kept_b


def ttt_linear_triton_backward(
    inputs: Inputs, grad_o: Tensor, grad_w: Tensor, grad_b: Tensor, kept_w: Tensor, kept_b: Tensor
) -> tuple[Tensor, ...]:
    """Backward pass. Arguments and results are those of :func:`ttt_linear_dual_backward`."""
    from vision_ttt.ops.ttt_linear import triton_scan, triton_segments

    q, ln_weight, position_scale = inputs.q, inputs.ln_weight, inputs.position_scale
    mini_batch_size = inputs.mini_batch_size
    call = _Call(inputs)
    batch, length, heads, dim = q.shape
    segments = num_checkpoints(length, dim, mini_batch_size) + 1
    grad_o = contiguous_last(grad_o.to(q.dtype))
    grad_w, grad_b, kept_w, kept_b = (
        x.float().contiguous() for x in (grad_w, grad_b, kept_w, kept_b)
    )
    dq, dk, dv = (call.empty(*q.shape, dtype=q.dtype) for _ in range(3))
    dw0, db0 = call.empty(batch, heads, dim, dim), call.empty(batch, heads, dim)
    deta = call.empty(batch, length, heads)

    # Tensors from the first kernel to the second. The shares of ∂K and ∂G use the memory of the
    # results, unless their dtype differs: float16 has too small a range for them, and bfloat16
    # without a norm too few digits.
    dtype = q.dtype if q.dtype == torch.bfloat16 and ln_weight is not None else torch.float32
    dk_share, dg_share = dk, dv
    if dtype != q.dtype:
        dk_share, dg_share = (call.empty(*q.shape, dtype=dtype) for _ in range(2))
    dz_q, x = (call.empty(*q.shape, dtype=dtype) for _ in range(2))
    norm = None if ln_weight is None else call.empty(batch, length, heads, 2)
    w_end = call.empty(batch, heads, dim, dim)
    between = (dk_share, dg_share, dz_q, x, norm, w_end)
    w_before = call.empty(segments, *w_end.shape) if call.kind["SEVERAL"] else None

    # Every program writes its own share of ∂γ and ∂β; the last B rows are the second kernel's.
    # Every token writes its own share of ∂p; the state adds one for the last token of a mini-batch.
    # PyTorch sums the shares in a fixed order.
    dweight = dbias = dscale = dlast = None
    of_segments = of_scan = (None, None)
    if ln_weight is not None:
        dweight, dbias = (call.empty((segments + 1) * batch, heads, dim) for _ in range(2))
        of_segments = dweight[: segments * batch], dbias[: segments * batch]
        of_scan = dweight[-batch:], dbias[-batch:]
    if position_scale is not None:
        dscale = call.empty(batch, length, heads)
        dlast = call.empty(batch, heads, -(-length // mini_batch_size))
    eta_float, _, _, weight, bias, scale = call.others
    with torch.cuda.device_of(q):
        triton_segments.segments.launch(
            segments * call.programs,
            *(*call.views, *call.others, grad_o, kept_w, kept_b, dq, *between, w_before),
            *(*of_segments, dscale),
            *(*call.strides, grad_o.stride()[:3], call.state_batch, call.scale_head),
            *(*call.sizes, call.programs, inputs.eps),
            **call.kind,
        )
        triton_scan.scan.launch(
            call.programs,
            *(*call.views, eta_float, weight, bias, scale, grad_w, grad_b, kept_w, *between),
            *(dk, dv, deta, dw0, db0, *of_scan, dlast),
            *(*call.strides, call.scale_head, *call.sizes),
            **call.kind,
        )

    def summed(share: Tensor | None, like: Tensor | None) -> Tensor:
        if share is None or like is None:
            return q.new_empty(0)
        return share.sum_to_size(like.shape).to(like.dtype).contiguous()

    if dscale is not None:
        dscale = _of_positions(dscale, dlast, mini_batch_size, inputs.reverse_heads)
    per_head = (None if x is None else x.sum(0) for x in (dweight, dbias, dscale))
    others = (deta, dw0, db0, *per_head)
    return dq, dk, dv, *map(summed, others, inputs[3:-3])


def _of_positions(x: Tensor, last: Tensor, mini_batch_size: int, reverse_heads: int) -> Tensor:
    """Sum the shares of tokens [B, T, H] and of mini-batches [B, H, M] to [B, H, positions]."""
    length = x.shape[1]
    forward, backward = x.split([x.shape[2] - reverse_heads, reverse_heads], dim=2)
    x = torch.cat([forward, backward.flip(1)], dim=2).transpose(1, 2)
    x = torch.nn.functional.pad(x, (0, -length % mini_batch_size))
    x = x.unflatten(2, (last.shape[-1], mini_batch_size)).sum(2)
    whole = length // mini_batch_size
    x[..., -1] += last[..., :whole].sum(-1)
    x[..., (length - 1) % mini_batch_size] += last[..., whole:].sum(-1)
    return x


BACKEND = Backend(ttt_linear_triton, ttt_linear_triton_backward, refusal)
