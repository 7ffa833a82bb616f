"""The linear inner learner's loss and gradient of every token, for explanation."""

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
from vision_ttt.ops.ttt_linear.contract import CONTRACTS, Inputs
from vision_ttt.ops.ttt_linear.dual import ttt_linear_dual
from vision_ttt.ops.ttt_linear.inner_model import InnerNorm, inner_gradient, inner_output


@torch.no_grad()
def ttt_linear_trace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w0: Tensor,
    b0: Tensor,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
    *,
    mini_batch_size: int = 16,
    position_scale: Tensor | None = None,
    reverse_heads: int = 0,
    eps: float = 1e-6,
) -> InnerTrace:
    """Trace the inner learner on the arguments of :func:`ttt_linear`, without gradients.

    The gradient of a token is G_t = k_tᵀ g_t, whose norm is ‖k_t‖ ‖g_t‖.

    Raises:
        TypeError, ValueError: as :func:`ttt_linear`.
    """
    tensors = (q, k, v, eta, w0, b0, ln_weight, ln_bias, position_scale)
    inputs = Inputs(*tensors, mini_batch_size, reverse_heads, eps)
    CONTRACTS.public.check(inputs)
    look = _look(ln_weight, ln_bias, eps)
    return trace_tokens(inputs, ("w0", "b0"), look, ttt_linear_dual)


@torch.no_grad()
def ttt_linear_losses(
    k: Tensor,
    v: Tensor,
    w0: Tensor,
    b0: Tensor,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
) -> TokenLosses:
    """Loss and gradient norm of every token at the state w0, b0, each [B, T, H], in token order.

    Nothing is learnt, and the tokens have no order. The arguments are those of :func:`ttt_linear`.

    Raises:
        TypeError, ValueError: as :func:`ttt_linear`.
    """
    CONTRACTS.one_state.check((k, v, w0, b0, ln_weight, ln_bias, eps))
    return losses_at(k, v, (w0, b0), _look(ln_weight, ln_bias, eps))


def _look(ln_weight: Tensor | None, ln_bias: Tensor | None, eps: float) -> Look:
    def look(k: Tensor, v: Tensor, state: Sequence[Tensor]) -> TokenLosses:
        norm = InnerNorm.of(ln_weight, ln_bias, eps, k.dtype)
        w, b = (x.to(k.dtype) for x in state)
        z = k @ w + b.unsqueeze(-2)
        g = inner_gradient(z, k, v, norm)
        loss = half_square(inner_output(k, z, norm) - v)
        return TokenLosses(loss, k.norm(dim=-1) * g.norm(dim=-1))

    return look
