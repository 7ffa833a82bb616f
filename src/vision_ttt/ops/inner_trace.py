"""Inner losses and gradient norms of every token of a learner op, for explanation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops._backend import autocast_kind
from vision_ttt.ops._contract import Contract
from vision_ttt.ops._learner_dual import Tensors, initial_state, learner_dual
from vision_ttt.ops._learner_inner_model import InnerNorm, inner_output, inner_step, layers_of
from vision_ttt.ops._learner_scan_order import mini_batches, put, take

TOKENS_AT_ONCE = 1024
"""Tokens that are looked at together where all meet one state: hidden layers are wide."""


class TokenLosses(NamedTuple):
    """Each token's inner loss ½‖f(k_t) − v_t‖² and its gradient's norm, at one state for all."""

    loss: Tensor
    gradient_norm: Tensor


class InnerTrace(NamedTuple):
    """Per-token record of one call of a learner op, each [B, T, H] in token order.

    With W' the state before token t's mini-batch and W_t the state that the token itself sees,
    after the step that includes it:

    - ``loss`` is ½‖f(k_t; W') − v_t‖². The TTT paper's ℓ(W_{t−1}; x_t) for mini-batches: the state
      at which the token's gradient is taken.
    - ``gradient_norm`` is the Frobenius norm of G_t = ∂loss/∂W' (Vision-TTT, Eq. 6) over all weight
      matrices of the inner model, without biases, of which the equation has none.
    - ``initial_loss`` and ``initial_gradient_norm`` are the same at W₀, before any step.
    - ``updated_loss`` is ½‖f(k_t; W_t) − v_t‖²: what the token still loses once it has been learnt.
    """

    loss: Tensor
    gradient_norm: Tensor
    initial_loss: Tensor
    initial_gradient_norm: Tensor
    updated_loss: Tensor


@torch.no_grad()
def token_losses(
    contract: Contract,
    *,
    k: Tensor,
    v: Tensor,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
    eps: float = 1e-6,
    **state: Tensor,
) -> TokenLosses:
    """Loss and gradient norm of every token at one state, each [B, T, H], in token order.

    Nothing is learnt, and the tokens have no order.

    Args:
        contract: the checks of these arguments.
        k, v, ln_weight, ln_bias, eps, state: as of the learner op.

    Raises:
        TypeError, ValueError: as the op.
    """
    names = contract.names[2:-3]
    if set(state) != set(names):
        raise TypeError(f"{contract.op}: the state is {', '.join(names)}, got {', '.join(state)}")
    tensors = tuple(state[name] for name in names)
    contract.check((k, v, *tensors, ln_weight, ln_bias, eps))
    return _losses_at(k, v, tensors, (ln_weight, ln_bias, eps))


def _losses_at(k: Tensor, v: Tensor, state: Tensors, norm: tuple[Any, ...]) -> TokenLosses:
    dtype = torch.promote_types(k.dtype, torch.float32)
    losses = TokenLosses(*(k.new_empty(k.shape[:3], dtype=dtype) for _ in TokenLosses._fields))
    with torch.autocast(autocast_kind(k), enabled=False):
        for start, stop in mini_batches(k.shape[1], TOKENS_AT_ONCE):
            pieces = _look(*(take(x, start, stop, 0).to(dtype) for x in (k, v)), state, norm)
            for whole, piece in zip(losses, pieces, strict=True):
                put(whole, piece, start, stop, 0)
    return losses


def _look(k: Tensor, v: Tensor, state: Tensors, norm: tuple[Any, ...]) -> TokenLosses:
    """Losses [B, H, n] of tokens k, v [B, H, n, d] at a state [H, …] or [B, H, …].

    The gradient of a token is that of the weight matrices, x_tᵀ g_t of each layer.
    """
    inner_norm = InnerNorm.of(*norm, k.dtype)
    inner = inner_step(k, v, layers_of([x.to(k.dtype) for x in state]), inner_norm)
    norms = [x.norm(dim=-1) * g.norm(dim=-1) for x, g in zip(inner.x, inner.g, strict=True)]
    loss = _half_square(inner_output(k, inner.z[-1], inner_norm) - v)
    return TokenLosses(loss, norms[0] if len(norms) == 1 else torch.hypot(*norms))


def _half_square(error: Tensor) -> Tensor:
    """½‖error‖² along the last axis."""
    return 0.5 * error.square().sum(-1)


@torch.no_grad()
def trace_tokens(
    kind: type[Any],
    contract: Contract,
    *,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
    position_scale: Tensor | None = None,
    mini_batch_size: int = 16,
    reverse_heads: int = 0,
    eps: float = 1e-6,
    **tensors: Tensor,
) -> InnerTrace:
    """Trace a learner op along its tokens, without gradients.

    Args:
        kind: the named tuple of the op's arguments.
        contract: the checks of the op's arguments, which are the others, by their names.

    Raises:
        TypeError, ValueError: as the op.
    """
    options = ln_weight, ln_bias, position_scale, mini_batch_size, reverse_heads, eps
    inputs = kind(**tensors, **dict(zip(kind._fields[-6:], options, strict=True)))
    contract.check(inputs)
    k, v, eta, state = inputs.k, inputs.v, inputs.eta, initial_state(inputs)
    dtype = torch.promote_types(k.dtype, torch.float32)
    norm = ln_weight, ln_bias, eps
    initial = _losses_at(k, v, state, norm)
    loss, gradient_norm, updated = (k.new_empty(k.shape[:3], dtype=dtype) for _ in range(3))
    with torch.autocast(autocast_kind(k), enabled=False):
        for start, stop in mini_batches(k.shape[1], mini_batch_size):
            k_t, v_t = (take(x, start, stop, reverse_heads).to(dtype) for x in (k, v))
            losses = _look(k_t, v_t, state, norm)
            # The op itself takes the step, on the training views in place of the test views: its
            # outputs are then the training views' own predictions after the step.
            tokens = k_t.transpose(1, 2), v_t.transpose(1, 2)
            rates = take(eta, start, stop, reverse_heads).transpose(1, 2)
            scale = None if position_scale is None else position_scale[..., : stop - start]
            step = kind(
                *(tokens[0], *tokens, rates, *state, ln_weight, ln_bias, scale),
                *(stop - start, 0, eps),
            )
            o, *after = learner_dual(step, save_states=False)
            state = tuple(after[: len(state)])
            pieces = *losses, _half_square(o - tokens[1]).transpose(1, 2)
            for whole, piece in zip((loss, gradient_norm, updated), pieces, strict=True):
                put(whole, piece, start, stop, reverse_heads)
    return InnerTrace(loss, gradient_norm, *initial, updated)
