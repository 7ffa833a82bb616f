"""TTT-Linear on a CPU: fills in csrc/ttt_linear/problem.h and calls the compiled kernels.

The structures below mirror that header field by field.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from vision_ttt.ops._native import LIBRARY, call_kernel, contiguous_last
from vision_ttt.ops.ttt_linear.dual import checkpoint_interval, num_checkpoints

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


class _Convolution(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, _Tokens) for name in ("q", "k", "v")),
        *((name, _Convolution) for name in ("conv_q", "conv_k")),
        *((name, c_void_p) for name in ("eta", "w0", "b0", "ln_weight", "ln_bias", "scale")),
        *((name, c_int64) for name in ("batch", "length", "heads", "dim")),
        *((name, c_int64) for name in ("mini_batch_size", "reverse_heads", "interval")),
        *((name, c_int64) for name in ("taps", "scale_heads", "state_batch")),
        *((name, c_int64) for name in ("is_bfloat16", "threads")),
        *((name, c_float) for name in ("eps", "rate")),
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


class Call:
    """One call's problem, with the float32 copies it points to kept alive.

    Args:
        tensors: q, k, v, eta, w0, b0, ln_weight, ln_bias, position_scale, as of the op.
        rate: where given, eta holds logits and the rates are rate · σ(eta).
        convolutions: for q and for k the weight [H · d, 1, K] and the bias [H · d] of a depth-wise
            convolution to take them through on their way in, looking back in scan order.
    """

    def __init__(
        self,
        tensors: tuple[Tensor | None, ...],
        mini_batch_size: int,
        reverse_heads: int,
        eps: float,
        rate: float | None = None,
        convolutions: tuple[tuple[Tensor, Tensor], ...] | None = None,
    ) -> None:
        q, k, v, *others = tensors
        self.views = [contiguous_last(x) for x in (q, k, v)]
        self.others = [None if x is None else _plain(x) for x in others]
        eta, w0, b0, ln_weight, ln_bias, scale = self.others
        batch, length, heads, dim = q.shape
        if w0.ndim != b0.ndim + 1:  # one has a batch axis, the other not
            w0 = self.others[1] = w0.expand(batch, heads, dim, dim).contiguous()
            b0 = self.others[2] = b0.expand(batch, heads, dim).contiguous()
        pointers = [_pointer(x) for x in (eta, w0, b0, ln_weight, ln_bias, scale)]
        self.taps = [(w.contiguous(), b.contiguous()) for w, b in convolutions or ()]
        taps = [_Convolution(w.data_ptr(), b.data_ptr()) for w, b in self.taps]
        self.problem = _Problem(
            *(_Tokens.of(x) for x in self.views),
            *(taps or (_Convolution(), _Convolution())),
            *pointers,
            *(batch, length, heads, dim, mini_batch_size, reverse_heads),
            checkpoint_interval(dim, mini_batch_size),
            self.taps[0][0].shape[-1] if taps else 0,
            1 if scale is None else heads * mini_batch_size // scale.numel(),
            *(w0.ndim == 4, q.dtype == torch.bfloat16, torch.get_num_threads()),
            *(eps, -1.0 if rate is None else rate),
        )

    def forward(
        self, save_states: bool, *, last_state: bool = True, o: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """o, W, b (both empty unless ``last_state``) and the kept states.

        An o [B, T, H, d] to write to may be v itself.
        """
        q, problem = self.views[0], self.problem
        batch, length, heads, dim = q.shape
        count = num_checkpoints(length, dim, problem.mini_batch_size) if save_states else 0
        o = torch.empty(q.shape, dtype=q.dtype) if o is None else o
        images = batch if last_state else 0
        w = torch.empty(images, heads, dim, dim)
        b = torch.empty(images, heads, dim)
        kept_w = torch.empty(count, batch, heads, dim, dim)
        kept_b = torch.empty(count, batch, heads, dim)
        kept = (kept_w.data_ptr(), kept_b.data_ptr()) if count else (None, None)
        last = (w.data_ptr(), b.data_ptr()) if last_state else (None, None)
        outputs = _Outputs(_Tokens.of(o), *last, *kept)
        self._run("vision_ttt_ttt_linear_forward", outputs)
        return o, w, b, kept_w, kept_b

    def backward(
        self,
        incoming: tuple[Tensor, ...],
        kept: tuple[Tensor, Tensor],
        views: tuple[Tensor, Tensor, Tensor],
    ) -> list[Tensor | None]:
        """Gradients of eta, the state, the norm and the scale, per head and image.

        Args:
            incoming: gradients of o, W and b.
            kept: the states that the forward pass kept.
            views: where to write the gradients of q, k and v [B, T, H, d].
        """
        batch, _, heads, dim = self.views[0].shape
        dtype = self.views[0].dtype
        o, *states = incoming
        read = [contiguous_last(o.to(dtype)), *(x.float().contiguous() for x in (*states, *kept))]
        shapes = (
            self.others[0].shape,
            (batch, heads, dim, dim),
            *3 * [(batch, heads, dim)],
            (batch, heads, self.problem.mini_batch_size),
        )
        shares = [
            None if like is None else torch.empty(shape)
            for like, shape in zip(self.others, shapes, strict=True)
        ]
        gradients = _Gradients(
            _Tokens.of(read[0]),
            *(x.data_ptr() for x in read[1:]),
            *(_Tokens.of(x) for x in views),
            *(_pointer(x) for x in shares),
        )
        self._run("vision_ttt_ttt_linear_backward", gradients)
        return shares

    def _run(self, function: str, results: ctypes.Structure) -> None:
        """Call a kernel, which fails only for want of memory."""
        if call_kernel(function, self.problem, results):
            raise MemoryError(f"{function}: no memory for the scratch of a thread")


def _plain(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 and x.is_contiguous() else x.float().contiguous()


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
    return Call(tensors, mini_batch_size, reverse_heads, eps).forward(save_states)


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
    call = Call(inputs, mini_batch_size, reverse_heads, eps)
    dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype) for _ in range(3))
    shares = call.backward((grad_o, grad_w, grad_b), (kept_w, kept_b), (dq, dk, dv))
    return dq, dk, dv, *map(add_shares, shares, inputs[3:])


def add_shares(share: Tensor | None, like: Tensor | None) -> Tensor:
    """The gradient of ``like`` from its heads' and images' shares; empty where there is none."""
    # Heads write their own shares; PyTorch adds them up in an order that does not change.
    if share is None or like is None:
        return torch.empty(0)
    return share.sum_to_size(like.shape).to(like.dtype).contiguous()
