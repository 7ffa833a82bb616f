"""TTT-Linear on a GPU: which calls the Triton kernels serve, and both passes' launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops._native import contiguous_last
from vision_ttt.ops._triton import DTYPES, FOUND, INTERPRETED
from vision_ttt.ops.ttt_linear.dual import checkpoint_interval, num_checkpoints

DIMENSIONS = (16, 32, 64, 128)
LARGEST_MINI_BATCH = 64
SMALLEST_TILE = 16
"""Rows of the smallest tile for tensor cores; a shorter mini-batch leaves some of them empty."""


def refusal(q: Tensor, mini_batch_size: int) -> str | None:
    """Why these kernels cannot serve a call on q [B, T, H, d], or None if they can."""
    if not FOUND:
        return "Triton is not installed (on Linux: pip install triton)"
    if q.device.type == "cpu" and not INTERPRETED:
        return "tensors are on cpu, and TRITON_INTERPRET=1 is not set"
    if q.device.type not in ("cpu", "cuda"):
        return f"tensors are on {q.device.type}"
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype} is not one of {DTYPES}"
    if q.shape[-1] not in DIMENSIONS:
        return f"head dimension {q.shape[-1]} is not one of {DIMENSIONS}"
    if mini_batch_size > LARGEST_MINI_BATCH:
        return f"mini_batch_size {mini_batch_size} is over {LARGEST_MINI_BATCH}"
    return None


def _products(dtype: torch.dtype, dim: int, mini_batch_size: int) -> dict[str, Any]:
    """Tile sizes, and how factors of products are rounded: see this folder's README."""
    import triton.language as tl

    tile = max(SMALLEST_TILE, 1 << (mini_batch_size - 1).bit_length())
    precision = "tf32x3"
    if dtype == torch.float16 or torch.backends.cuda.matmul.fp32_precision == "tf32":
        precision = "tf32"
    if (dtype, dim, tile) == (torch.float32, 128, 64) and not INTERPRETED:
        # The largest tiles fit a multiprocessor's memory only as sums of three bfloat16 numbers.
        precision = "bf16x6"
    operand = tl.bfloat16 if dtype == torch.bfloat16 else tl.float32
    return {"DIM": dim, "TILE": tile, "OPERAND": operand, "PRECISION": precision}


class _Call:
    """One call's tensors as the kernels take them, and the arguments that all kernels share."""

    def __init__(
        self, tensors: tuple[Tensor | None, ...], mini_batch_size: int, reverse_heads: int
    ) -> None:
        q, k, v, *others = tensors
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
        interval = checkpoint_interval(dim, mini_batch_size)
        self.sizes = (length, heads, reverse_heads, mini_batch_size, interval)
        self.products = _products(q.dtype, dim, mini_batch_size)
        self.device = q.device

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)


def ttt_linear_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w0: Tensor,
    b0: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    position_scale: Tensor | None,
    mini_batch_size: int,
    reverse_heads: int,
    eps: float,
    save_states: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute what :func:`ttt_linear_dual` does."""
    from vision_ttt.ops.ttt_linear import triton_forward, triton_tuning

    tensors = (q, k, v, eta, w0, b0, ln_weight, ln_bias, position_scale)
    call = _Call(tensors, mini_batch_size, reverse_heads)
    batch, length, heads, dim = q.shape
    count = num_checkpoints(length, dim, mini_batch_size) if save_states else 0
    o = call.empty(*q.shape, dtype=q.dtype)
    w, b = call.empty(batch, heads, dim, dim), call.empty(batch, heads, dim)
    kept_w = call.empty(count, batch, heads, dim, dim)
    kept_b = call.empty(count, batch, heads, dim)
    # Keeping states takes registers that the crowded kernel has not.
    crowded = not count and triton_tuning.crowds(call.programs, q.device)
    with torch.cuda.device_of(q):
        triton_tuning.launch(
            triton_forward.crowded_forward if crowded else triton_forward.forward,
            call.programs,
            *(*call.views, *call.others, o, w, b),
            *((kept_w, kept_b) if count else (None, None)),
            *(*call.strides, call.state_batch, call.scale_head, *call.sizes, eps),
            **call.products,
        )
    return o, w, b, kept_w, kept_b


def ttt_linear_triton_backward(
    grad_o: Tensor,
    grad_w: Tensor,
    grad_b: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w0: Tensor,
    b0: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    position_scale: Tensor | None,
    kept_w: Tensor,
    kept_b: Tensor,
    mini_batch_size: int,
    reverse_heads: int,
    eps: float,
) -> tuple[Tensor, ...]:
    """Compute what :func:`ttt_linear_dual_backward` does."""
    from vision_ttt.ops.ttt_linear import triton_backward, triton_tuning

    inputs = (q, k, v, eta, w0, b0, ln_weight, ln_bias, position_scale)
    call = _Call(inputs, mini_batch_size, reverse_heads)
    batch, length, heads, dim = q.shape
    segments = num_checkpoints(length, dim, mini_batch_size) + 1
    grad_o = contiguous_last(grad_o.to(q.dtype))
    grad_w, grad_b, kept_w, kept_b = (
        x.float().contiguous() for x in (grad_w, grad_b, kept_w, kept_b)
    )
    dq, dk, dv = (call.empty(*q.shape, dtype=q.dtype) for _ in range(3))
    dw0, db0 = call.empty(batch, heads, dim, dim), call.empty(batch, heads, dim)
    deta = call.empty(batch, length, heads)

    # What the first kernel hands to the second. Two shares lie where the results will, but float16
    # has too narrow a range for them, and without a norm bfloat16 too few digits.
    handed = q.dtype if q.dtype == torch.bfloat16 and ln_weight is not None else torch.float32
    dk_share, dg_share = dk, dv
    if handed != q.dtype:
        dk_share, dg_share = (call.empty(*q.shape, dtype=handed) for _ in range(2))
    dz_q, x = (call.empty(*q.shape, dtype=handed) for _ in range(2))
    norm = None if ln_weight is None else call.empty(batch, length, heads, 2)
    w_end = call.empty(batch, heads, dim, dim)
    between = (dk_share, dg_share, dz_q, x, norm, w_end)

    # Every program writes its own share of ∂γ and ∂p; the last B rows of H shares are the second
    # kernel's, whose alone is ∂β's. PyTorch adds them up in an order that does not change.
    rows = (segments + 1) * batch
    dweight = dbias = dscale = None
    if ln_weight is not None:
        dweight, dbias = call.empty(rows, heads, dim), call.empty(batch, heads, dim)
    if position_scale is not None:
        dscale = call.empty(rows, heads, mini_batch_size)
    of_segments = [None if x is None else x[: segments * batch] for x in (dweight, dscale)]
    of_scan = [None if x is None else x[-batch:] for x in (dweight, dbias, dscale)]
    eta_float, _, _, weight, bias, scale = call.others
    with torch.cuda.device_of(q):
        triton_tuning.launch(
            triton_backward.segments,
            segments * call.programs,
            *(*call.views, *call.others, grad_o, kept_w, kept_b, dq, *between, *of_segments),
            *(*call.strides, grad_o.stride()[:3], call.state_batch, call.scale_head),
            *(*call.sizes, call.programs, eps),
            **call.products,
        )
        triton_tuning.launch(
            triton_backward.scan,
            call.programs,
            *(*call.views, eta_float, weight, bias, scale, grad_w, grad_b, kept_w, *between),
            *(dk, dv, deta, dw0, db0, *of_scan),
            *(*call.strides, call.scale_head, *call.sizes),
            **call.products,
        )

    if dbias is not None:  # of o = f(q) too, beside the scan's of the inner loss
        dbias += grad_o.sum(1, dtype=torch.float32)

    def summed(share: Tensor | None, like: Tensor | None) -> Tensor:
        if share is None or like is None:
            return q.new_empty(0)
        return share.sum_to_size(like.shape).to(like.dtype).contiguous()

    per_head = (None if x is None else x.sum(0) for x in (dweight, dbias, dscale))
    others = (deta, dw0, db0, *per_head)
    return dq, dk, dv, *map(summed, others, inputs[3:])
