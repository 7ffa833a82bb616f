"""What a call of ttt_mlp must satisfy, with errors that name what came and what is accepted."""

from __future__ import annotations

from torch import Tensor

from vision_ttt.ops._checks import check_learner, check_views

WIDENING = 4
"""The hidden layer has so many times the d units of a head (TTT, Sec. 2.7)."""


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    position_scale: Tensor | None,
    *,
    mini_batch_size: int,
    reverse_heads: int,
    eps: float,
) -> None:
    """Raise TypeError or ValueError unless the arguments are those of :func:`ttt_mlp`."""
    check_views("ttt_mlp", q, k, v)
    dim = q.shape[-1]
    hidden = WIDENING * dim
    state = {
        "w1": (w1, (dim, hidden)),
        "b1": (b1, (hidden,)),
        "w2": (w2, (hidden, dim)),
        "b2": (b2, (dim,)),
    }
    check_learner(
        "ttt_mlp",
        q,
        eta,
        state,
        ln_weight,
        ln_bias,
        position_scale,
        mini_batch_size=mini_batch_size,
        reverse_heads=reverse_heads,
        eps=eps,
    )
