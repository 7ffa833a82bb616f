"""What a call of ttt_linear must satisfy, with errors that name what came and what is accepted."""

from __future__ import annotations

import torch
from torch import Tensor

VIEW_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _check_shape(name: str, x: Tensor, *accepted: tuple[int, ...]) -> None:
    if tuple(x.shape) not in accepted:
        choices = " or ".join(str(list(shape)) for shape in accepted)
        raise ValueError(f"ttt_linear: {name} must have shape {choices}, got {list(x.shape)}")


def _check_int(name: str, value: object) -> None:
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"ttt_linear: {name} must be an int, got {value!r}")


def _check_views(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"ttt_linear: {name} must be a tensor, got {type(x).__name__}")
    if q.ndim != 4:
        raise ValueError(f"ttt_linear: q must have shape [B, T, H, d], got {list(q.shape)}")
    for name, x in (("k", k), ("v", v)):
        if x.shape != q.shape:
            raise ValueError(
                f"ttt_linear: {name} must have q's shape {list(q.shape)}, got {list(x.shape)}"
            )
        if x.device != q.device:
            raise ValueError(f"ttt_linear: {name} is on {x.device}, q on {q.device}")
    if 0 in q.shape[1:]:
        raise ValueError(f"ttt_linear: T, H and d must be at least 1, got q {list(q.shape)}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in VIEW_DTYPES:
            raise TypeError(f"ttt_linear: {name} must be one of {VIEW_DTYPES}, got {x.dtype}")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(
                f"ttt_linear: {name}'s last axis must be contiguous, got strides {x.stride()}"
            )
    if not (q.dtype == k.dtype == v.dtype or torch.is_autocast_enabled(q.device.type)):
        raise TypeError(
            f"ttt_linear: q, k, v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w0: Tensor,
    b0: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    position_scale: Tensor | None,
    *,
    mini_batch_size: int,
    reverse_heads: int,
    eps: float,
) -> None:
    """Raise TypeError or ValueError unless the arguments are those of :func:`ttt_linear`."""
    _check_views(q, k, v)
    batch, length, heads, dim = q.shape
    _check_int("mini_batch_size", mini_batch_size)
    _check_int("reverse_heads", reverse_heads)
    if eps < 0:
        raise ValueError(f"ttt_linear: eps must be at least 0, got {eps}")
    if mini_batch_size < 1:
        raise ValueError(f"ttt_linear: mini_batch_size must be at least 1, got {mini_batch_size}")
    if not 0 <= reverse_heads <= heads:
        raise ValueError(f"ttt_linear: reverse_heads must be in 0 … {heads}, got {reverse_heads}")
    if (ln_weight is None) != (ln_bias is None):
        raise ValueError("ttt_linear: give both ln_weight and ln_bias, or neither")

    _check_shape("eta", eta, (batch, length, heads))
    _check_shape("w0", w0, (heads, dim, dim), (batch, heads, dim, dim))
    _check_shape("b0", b0, (heads, dim), (batch, heads, dim))
    for name, x in (("ln_weight", ln_weight), ("ln_bias", ln_bias)):
        if x is not None:
            _check_shape(name, x, (heads, dim))
    if position_scale is not None:
        shapes = (mini_batch_size,), (heads, mini_batch_size)
        _check_shape("position_scale", position_scale, *shapes)

    others = {"eta": eta, "w0": w0, "b0": b0, "ln_weight": ln_weight, "ln_bias": ln_bias}
    others["position_scale"] = position_scale
    for name, x in others.items():
        if x is None:
            continue
        if not x.dtype.is_floating_point:
            raise TypeError(f"ttt_linear: {name} must be floating point, got {x.dtype}")
        if x.dtype == torch.float64 and q.dtype != torch.float64:
            raise TypeError(f"ttt_linear: {name} is float64, q is not ({q.dtype})")
        if x.device != q.device:
            raise ValueError(f"ttt_linear: {name} is on {x.device}, q on {q.device}")
