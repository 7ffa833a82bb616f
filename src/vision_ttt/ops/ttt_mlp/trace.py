"""The two-layer inner learner's loss and gradient of every token, for explanation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vision_ttt.ops.inner_trace import (
    InnerTrace,
    Look,
    TokenLosses,
    half_square,
    losses_at,
    trace_tokens,
)
from vision_ttt.ops.ttt_linear.inner_model import InnerNorm, inner_output
from vision_ttt.ops.ttt_mlp.contract import CONTRACTS, Inputs
from vision_ttt.ops.ttt_mlp.dual import ttt_mlp_dual
from vision_ttt.ops.ttt_mlp.inner_model import State, inner_step


@torch.no_grad()
def ttt_mlp_trace(
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
) -> InnerTrace:
    """Trace the inner learner on the arguments of :func:`ttt_mlp`, without gradients.

    The gradient of a token is that of both weight matrices, k_tᵀ g¹_t and x²_tᵀ g²_t with the
    hidden layer's activations x²_t; its norm is √(‖k_t‖² ‖g¹_t‖² + ‖x²_t‖² ‖g²_t‖²).

    Raises:
        TypeError, ValueError: as :func:`ttt_mlp`.
    """
    tensors = (q, k, v, eta, w1, b1, w2, b2, ln_weight, ln_bias, position_scale)
    inputs = Inputs(*tensors, mini_batch_size, reverse_heads, eps)
    CONTRACTS.public.check(inputs)
    look = _look(ln_weight, ln_bias, eps)
    return trace_tokens(inputs, ("w1", "b1", "w2", "b2"), look, ttt_mlp_dual)


@torch.no_grad()
def ttt_mlp_losses(
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
) -> TokenLosses:
    """Loss and gradient norm of every token at the state w1 … b2, each [B, T, H], in token order.

    Nothing is learnt, and the tokens have no order. The arguments are those of :func:`ttt_mlp`.

    Raises:
        TypeError, ValueError: as :func:`ttt_mlp`.
    """
    CONTRACTS.one_state.check((k, v, w1, b1, w2, b2, ln_weight, ln_bias, eps))
    return losses_at(k, v, (w1, b1, w2, b2), _look(ln_weight, ln_bias, eps))


def _look(ln_weight: Tensor | None, ln_bias: Tensor | None, eps: float) -> Look:
    def look(k: Tensor, v: Tensor, state: Sequence[Tensor]) -> TokenLosses:
        norm = InnerNorm.of(ln_weight, ln_bias, eps, k.dtype)
        inner = inner_step(k, v, State.initial(*state, len(k), k.dtype), norm)
        loss = half_square(inner_output(k, inner.z2, norm) - v)
        first = k.norm(dim=-1) * inner.g1.norm(dim=-1)
        second = inner.x2.norm(dim=-1) * inner.g2.norm(dim=-1)
        return TokenLosses(loss, torch.hypot(first, second))

    return look
