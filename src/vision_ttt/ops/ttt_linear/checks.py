"""What a call of ttt_linear must satisfy, with errors that name what came and what is accepted."""

from __future__ import annotations

from torch import Tensor

from vision_ttt.ops._checks import check_learner, check_views


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
    check_views("ttt_linear", q, k, v)
    dim = q.shape[-1]
    check_learner(
        "ttt_linear",
        q,
        eta,
        {"w0": (w0, (dim, dim)), "b0": (b0, (dim,))},
        ln_weight,
        ln_bias,
        position_scale,
        mini_batch_size=mini_batch_size,
        reverse_heads=reverse_heads,
        eps=eps,
    )
