"""Inner losses and gradient norms of every token of a learner op, for explanation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops.ttt_linear.scan_order import mini_batches, put, take

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


Look = Callable[[Tensor, Tensor, Sequence[Tensor]], TokenLosses]
"""(k, v [B, H, n, d], the state's tensors [H, …] or [B, H, …]) → losses of the tokens [B, H, n]."""


def half_square(error: Tensor) -> Tensor:
    """½‖error‖² along the last axis."""
    return 0.5 * error.square().sum(-1)


def losses_at(k: Tensor, v: Tensor, state: Sequence[Tensor], look: Look) -> TokenLosses:
    """Losses [B, T, H] of all tokens k, v [B, T, H, d] at one state."""
    dtype = torch.promote_types(k.dtype, torch.float32)
    losses = TokenLosses(*(k.new_empty(k.shape[:3], dtype=dtype) for _ in TokenLosses._fields))
    with torch.autocast(k.device.type, enabled=False):
        for start, stop in mini_batches(k.shape[1], TOKENS_AT_ONCE):
            pieces = look(*(take(x, start, stop, 0).to(dtype) for x in (k, v)), state)
            for whole, piece in zip(losses, pieces, strict=True):
                put(whole, piece, start, stop, 0)
    return losses


def trace_tokens(
    inputs: Any, names: Sequence[str], look: Look, run: Callable[..., tuple[Tensor, ...]]
) -> InnerTrace:
    """Trace a learner op along its tokens.

    Args:
        inputs: the op's arguments, checked.
        names: of the initial state's tensors among them.
        look: losses at a state.
        run: the op's dual form, (inputs, save_states) → o, the last state, saved states.
    """
    k, v, eta, scale = inputs.k, inputs.v, inputs.eta, inputs.position_scale
    reverse_heads = inputs.reverse_heads
    dtype = torch.promote_types(k.dtype, torch.float32)
    state = [getattr(inputs, name) for name in names]
    initial = losses_at(k, v, state, look)
    loss, gradient_norm, updated = (k.new_empty(k.shape[:3], dtype=dtype) for _ in range(3))
    with torch.autocast(k.device.type, enabled=False):
        for start, stop in mini_batches(k.shape[1], inputs.mini_batch_size):
            k_t, v_t = (take(x, start, stop, reverse_heads).to(dtype) for x in (k, v))
            losses = look(k_t, v_t, state)
            # The op itself takes the step, on the training views in place of the test views: its
            # outputs are then the training views' own predictions after the step.
            tokens = k_t.transpose(1, 2), v_t.transpose(1, 2)
            o, *after = run(
                inputs._replace(
                    q=tokens[0],
                    k=tokens[0],
                    v=tokens[1],
                    eta=take(eta, start, stop, reverse_heads).transpose(1, 2),
                    **dict(zip(names, state, strict=True)),
                    position_scale=None if scale is None else scale[..., : stop - start],
                    mini_batch_size=stop - start,
                    reverse_heads=0,
                ),
                save_states=False,
            )
            state = after[: len(names)]
            pieces = *losses, half_square(o - tokens[1]).transpose(1, 2)
            for whole, piece in zip((loss, gradient_norm, updated), pieces, strict=True):
                put(whole, piece, start, stop, reverse_heads)
    return InnerTrace(loss, gradient_norm, *initial, updated)
