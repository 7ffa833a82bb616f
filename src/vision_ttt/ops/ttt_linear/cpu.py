"""TTT-Linear on a CPU: fills in csrc/ttt_linear/problem.h and calls the compiled kernels.

The structures below mirror that header field by field.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from vision_ttt.ops._native import LIBRARY, call_kernel, contiguous_last
from vision_ttt.ops.ttt_linear.dual import num_checkpoints

DIMENSIONS = (16, 32, 64, 128)
LARGEST_MINI_BATCH = 64
DTYPES = (torch.float32, torch.bfloat16)


class _Tokens(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("batch", c_int64),
        ("token", c_int64),
        ("head", c_int64),
    )

    @classmethod
    def of(cls, x: Tensor) -> _Tokens:
        """Describe x [B, T, H, d]."""
        return cls(x.data_ptr(), *x.stride()[:3])


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, _Tokens) for name in ("q", "k", "v")),
        *((name, c_void_p) for name in ("eta", "w0", "b0", "ln_weight", "ln_bias", "scale")),
        *((name, c_int64) for name in ("batch", "length", "heads", "dim")),
        *((name, c_int64) for name in ("mini_batch_size", "reverse_heads")),
        *((name, c_int64) for name in ("state_batch", "is_bfloat16", "threads")),
        ("eps", c_float),
    )


class _Outputs(ctypes.Structure):
    _fields_ = (("o", _Tokens), *((name, c_void_p) for name in ("w", "b", "kept_w", "kept_b")))


class _Gradients(ctypes.Structure):
    _fields_ = (
        ("o", _Tokens),
        *((name, c_void_p) for name in ("w", "b", "kept_w", "kept_b")),
        *((name, _Tokens) for name in ("dq", "dk", "dv")),
        *((name, c_void_p) for name in ("deta", "dw0", "db0")),
        *((name, c_void_p) for name in ("dln_weight", "dln_bias", "dscale")),
    )


def refusal(q: Tensor, mini_batch_size: int) -> str | None:
    """Why these kernels cannot serve a call on q [B, T, H, d], or None if they can."""
    if q.device.type != "cpu":
        return f"tensors are on {q.device.type}"
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype} is not one of {DTYPES}"
    if q.shape[-1] not in DIMENSIONS:
        return f"head dimension {q.shape[-1]} is not one of {DIMENSIONS}"
    if mini_batch_size > LARGEST_MINI_BATCH:
        return f"mini_batch_size {mini_batch_size} is over {LARGEST_MINI_BATCH}"
    if LIBRARY is None:
        return "the compiled kernels are missing"
    return None


class _Call:
    """One call's problem, with the float32 copies it points to kept alive."""

    def __init__(
        self,
        tensors: tuple[Tensor | None, ...],
        mini_batch_size: int,
        reverse_heads: int,
        eps: float,
    ) -> None:
        q, k, v, *others = tensors
        self.views = [contiguous_last(x) for x in (q, k, v)]
        self.others = [None if x is None else x.float().contiguous() for x in others]
        eta, w0, b0, ln_weight, ln_bias, scale = self.others
        batch, length, heads, dim = q.shape
        if scale is not None and scale.ndim == 1:
            scale = self.others[5] = scale.repeat(heads, 1)
        if w0.ndim != b0.ndim + 1:  # one has a batch axis, the other not
            w0 = self.others[1] = w0.expand(batch, heads, dim, dim).contiguous()
            b0 = self.others[2] = b0.expand(batch, heads, dim).contiguous()
        pointers = [_pointer(x) for x in (eta, w0, b0, ln_weight, ln_bias, scale)]
        self.problem = _Problem(
            *(_Tokens.of(x) for x in self.views),
            *pointers,
            *(batch, length, heads, dim, mini_batch_size, reverse_heads),
            *(w0.ndim == 4, q.dtype == torch.bfloat16, torch.get_num_threads()),
            eps,
        )

    def run(self, function: str, results: ctypes.Structure) -> None:
        """Call a kernel, which fails only for want of memory."""
        if call_kernel(function, self.problem, results):
            raise MemoryError(f"{function}: no memory for the scratch of a thread")


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def ttt_linear_cpu(
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
    tensors = (q, k, v, eta, w0, b0, ln_weight, ln_bias, position_scale)
    call = _Call(tensors, mini_batch_size, reverse_heads, eps)
    batch, length, heads, dim = q.shape
    count = num_checkpoints(length, dim, mini_batch_size) if save_states else 0
    float32 = {"dtype": torch.float32, "device": q.device}
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    w = torch.empty(batch, heads, dim, dim, **float32)
    b = torch.empty(batch, heads, dim, **float32)
    kept_w = torch.empty(count, batch, heads, dim, dim, **float32)
    kept_b = torch.empty(count, batch, heads, dim, **float32)
    kept = (kept_w.data_ptr(), kept_b.data_ptr()) if count else (None, None)
    outputs = _Outputs(_Tokens.of(o), w.data_ptr(), b.data_ptr(), *kept)
    call.run("vision_ttt_ttt_linear_forward", outputs)
    return o, w, b, kept_w, kept_b


def ttt_linear_cpu_backward(
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
    inputs = (q, k, v, eta, w0, b0, ln_weight, ln_bias, position_scale)
    call = _Call(inputs, mini_batch_size, reverse_heads, eps)
    batch, _, heads, dim = q.shape
    incoming = [contiguous_last(grad_o.to(q.dtype)), grad_w.float().contiguous()]
    incoming += [x.contiguous() for x in (grad_b.float(), kept_w, kept_b)]
    dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype) for _ in range(3))

    def result(*shape: int, like: Tensor | None) -> Tensor | None:
        return None if like is None else torch.empty(*shape, dtype=torch.float32)

    others = [
        result(*eta.shape, like=eta),
        result(batch, heads, dim, dim, like=w0),
        result(batch, heads, dim, like=b0),
        result(batch, heads, dim, like=ln_weight),
        result(batch, heads, dim, like=ln_bias),
        result(batch, heads, mini_batch_size, like=position_scale),
    ]
    gradients = _Gradients(
        _Tokens.of(incoming[0]),
        *(x.data_ptr() for x in incoming[1:]),
        *(_Tokens.of(x) for x in (dq, dk, dv)),
        *(_pointer(x) for x in others),
    )
    call.run("vision_ttt_ttt_linear_backward", gradients)

    def summed(share: Tensor | None, like: Tensor | None) -> Tensor:
        # Heads write their own shares; PyTorch adds them up in an order that does not change.
        if share is None or like is None:
            return q.new_empty(0)
        return share.sum_to_size(like.shape).to(like.dtype).contiguous()

    return dq, dk, dv, *map(summed, others, inputs[3:])
