"""What every op that learns along the tokens asks of its arguments.

Errors name the op, what came and what is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

VIEW_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_shape(op: str, name: str, x: Tensor, *accepted: tuple[int, ...]) -> None:
    """Raise ValueError unless x has one of the accepted shapes."""
    if tuple(x.shape) not in accepted:
        choices = " or ".join(str(list(shape)) for shape in accepted)
        raise ValueError(f"{op}: {name} must have shape {choices}, got {list(x.shape)}")


def check_int(op: str, name: str, value: object) -> None:
    """Raise TypeError unless value is an int."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be an int, got {value!r}")


def check_views(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise TypeError or ValueError unless q, k, v are views [B, T, H, d] that fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(x).__name__}")
    if q.ndim != 4:
        raise ValueError(f"{op}: q must have shape [B, T, H, d], got {list(q.shape)}")
    for name, x in (("k", k), ("v", v)):
        if x.shape != q.shape:
            raise ValueError(
                f"{op}: {name} must have q's shape {list(q.shape)}, got {list(x.shape)}"
            )
        if x.device != q.device:
            raise ValueError(f"{op}: {name} is on {x.device}, q on {q.device}")
    if 0 in q.shape[1:]:
        raise ValueError(f"{op}: T, H and d must be at least 1, got q {list(q.shape)}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in VIEW_DTYPES:
            raise TypeError(f"{op}: {name} must be one of {VIEW_DTYPES}, got {x.dtype}")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(
                f"{op}: {name}'s last axis must be contiguous, got strides {x.stride()}"
            )
    if not (q.dtype == k.dtype == v.dtype or torch.is_autocast_enabled(q.device.type)):
        raise TypeError(f"{op}: q, k, v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")


def check_learner(
    op: str,
    q: Tensor,
    eta: Tensor,
    state: Mapping[str, tuple[Tensor, tuple[int, ...]]],
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    position_scale: Tensor | None,
    *,
    mini_batch_size: int,
    reverse_heads: int,
    eps: float,
) -> None:
    """Raise TypeError or ValueError unless the learner of the op fits its views.

    Args:
        op: the op's public name.
        q: a view that :func:`check_views` has passed.
        state: for each name of the initial state its tensor and its shape behind [H] or [B, H].
        eta, ln_weight, ln_bias, position_scale, mini_batch_size, reverse_heads, eps: as the op's.
    """
    batch, length, heads, dim = q.shape
    check_int(op, "mini_batch_size", mini_batch_size)
    check_int(op, "reverse_heads", reverse_heads)
    if eps < 0:
        raise ValueError(f"{op}: eps must be at least 0, got {eps}")
    if mini_batch_size < 1:
        raise ValueError(f"{op}: mini_batch_size must be at least 1, got {mini_batch_size}")
    if not 0 <= reverse_heads <= heads:
        raise ValueError(f"{op}: reverse_heads must be in 0 … {heads}, got {reverse_heads}")
    if (ln_weight is None) != (ln_bias is None):
        raise ValueError(f"{op}: give both ln_weight and ln_bias, or neither")

    check_shape(op, "eta", eta, (batch, length, heads))
    for name, (x, shape) in state.items():
        check_shape(op, name, x, (heads, *shape), (batch, heads, *shape))
    for name, x in (("ln_weight", ln_weight), ("ln_bias", ln_bias)):
        if x is not None:
            check_shape(op, name, x, (heads, dim))
    if position_scale is not None:
        shapes = (mini_batch_size,), (heads, mini_batch_size)
        check_shape(op, "position_scale", position_scale, *shapes)

    others = {"eta": eta, **{name: x for name, (x, _) in state.items()}}
    others |= {"ln_weight": ln_weight, "ln_bias": ln_bias, "position_scale": position_scale}
    for name, x in others.items():
        if x is None:
            continue
        if not x.dtype.is_floating_point:
            raise TypeError(f"{op}: {name} must be floating point, got {x.dtype}")
        if x.dtype == torch.float64 and q.dtype != torch.float64:
            raise TypeError(f"{op}: {name} is float64, q is not ({q.dtype})")
        if x.device != q.device:
            raise ValueError(f"{op}: {name} is on {x.device}, q on {q.device}")
