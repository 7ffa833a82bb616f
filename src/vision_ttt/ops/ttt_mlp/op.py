"""The public function of ttt_mlp and its registration."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from vision_ttt.ops._learner_op import learner_op
from vision_ttt.ops._learner_part import learner_part
from vision_ttt.ops._learner_state import run_learner
from vision_ttt.ops._torch_function import overridable
from vision_ttt.ops.ttt_mlp import triton_backend
from vision_ttt.ops.ttt_mlp.contract import CONTRACTS, Inputs, MLPState
from vision_ttt.ops.ttt_mlp.definition import ttt_mlp_definition
from vision_ttt.ops.ttt_mlp.scan import ttt_mlp_loop

OP = learner_op(
    "ttt_mlp",
    Inputs,
    CONTRACTS,
    ttt_mlp_definition,
    {"triton": triton_backend.BACKEND},
    exported=ttt_mlp_loop,
)
PART = learner_part(OP, CONTRACTS.part, triton_backend.launch_part)


@overload
def ttt_mlp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    ln_weight: Tensor | None = ...,
    ln_bias: Tensor | None = ...,
    *,
    mini_batch_size: int = ...,
    position_scale: Tensor | None = ...,
    reverse_heads: int = ...,
    eps: float = ...,
    state: MLPState | None = ...,
    lengths: Tensor | None = ...,
    return_state: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...
@overload
def ttt_mlp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    ln_weight: Tensor | None = ...,
    ln_bias: Tensor | None = ...,
    *,
    mini_batch_size: int = ...,
    position_scale: Tensor | None = ...,
    reverse_heads: int = ...,
    eps: float = ...,
    state: MLPState | None = ...,
    lengths: Tensor | None = ...,
    return_state: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, MLPState]: ...
@overridable
def ttt_mlp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
    *,
    mini_batch_size: int = 16,
    position_scale: Tensor | None = None,
    reverse_heads: int = 0,
    eps: float = 1e-6,
    state: MLPState | None = None,
    lengths: Tensor | None = None,
    return_state: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, MLPState]:
    """Mini-batch gradient descent on a two-layer inner model, along the tokens of each head.

    It is :func:`vision_ttt.ops.ttt_linear` with another inner model. With θ = (w1, b1, w2, b2) and
    θ' its value before the current mini-batch, s ≤ t its tokens so far (TTT, Eq. 4-6 and Sec. 2.7;
    row vectors)::

        θ_t = θ' − p_t Σ_{s≤t} η_s ∂/∂θ' ½‖f(k_s; θ') − v_s‖²
        o_t = f(q_t; θ_t)

    where, with the tanh form of GELU, f(x) = x + LN(GELU(x w1 + b1) w2 + b2) with an inner norm and
    f(x) = GELU(x w1 + b1) w2 + b2 without. The papers' loss has no ½: their η is ``eta / 2``.

    Args:
        q, k, v, eta: as of ``ttt_linear``.
        w1, b1: initial hidden layer [H, d, 4d] and [H, 4d], or with a leading B.
        w2, b2: initial output layer [H, 4d, d] and [H, d], or with a leading B.
        ln_weight, ln_bias, mini_batch_size, position_scale, reverse_heads, eps, lengths: as of
            ``ttt_linear``.
        state, return_state: as of ``ttt_linear``; a state is a :class:`MLPState`.
        backend: as of ``ttt_linear``.

    Returns:
        o [B, T, H, d] in q's dtype; with ``return_state`` also the state, each tensor with a
        leading [B, H], in float32 (float64 where q is). Differentiable in every tensor argument; a
        second derivative (``create_graph=True``) is the definition's, with a state per token.

    Raises:
        TypeError, ValueError: as ``ttt_linear``.
    """
    tensors = (q, k, v, eta, w1, b1, w2, b2, ln_weight, ln_bias, position_scale)
    inputs = Inputs(*tensors, mini_batch_size, reverse_heads, eps)
    return run_learner(
        *(OP, PART, CONTRACTS.state, MLPState, inputs, state, backend),
        return_state=return_state,
        lengths=lengths,
    )
