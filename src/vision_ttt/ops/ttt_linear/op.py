"""The public function of ttt_linear and its registration."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from vision_ttt.ops._learner_op import learner_op
from vision_ttt.ops._learner_part import learner_part
from vision_ttt.ops._learner_state import run_learner
from vision_ttt.ops._torch_function import overridable
from vision_ttt.ops.ttt_linear import triton_backend
from vision_ttt.ops.ttt_linear.contract import CONTRACTS, Inputs, LinearState
from vision_ttt.ops.ttt_linear.definition import ttt_linear_definition
from vision_ttt.ops.ttt_linear.scan import ttt_linear_loop

OP = learner_op(
    "ttt_linear",
    Inputs,
    CONTRACTS,
    ttt_linear_definition,
    {"triton": triton_backend.BACKEND},
    exported=ttt_linear_loop,
)
PART = learner_part(OP, CONTRACTS.part, triton_backend.launch_part)


@overload
def ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w0: Tensor,
    b0: Tensor,
    ln_weight: Tensor | None = ...,
    ln_bias: Tensor | None = ...,
    *,
    mini_batch_size: int = ...,
    position_scale: Tensor | None = ...,
    reverse_heads: int = ...,
    eps: float = ...,
    state: LinearState | None = ...,
    lengths: Tensor | None = ...,
    return_state: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...
@overload
def ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w0: Tensor,
    b0: Tensor,
    ln_weight: Tensor | None = ...,
    ln_bias: Tensor | None = ...,
    *,
    mini_batch_size: int = ...,
    position_scale: Tensor | None = ...,
    reverse_heads: int = ...,
    eps: float = ...,
    state: LinearState | None = ...,
    lengths: Tensor | None = ...,
    return_state: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, LinearState]: ...
@overridable
def ttt_linear(
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
    state: LinearState | None = None,
    lengths: Tensor | None = None,
    return_state: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, LinearState]:
    """Mini-batch gradient descent on a linear inner model, along the tokens of each head.

    The tokens of a head are a dataset: k_t the input (training view), v_t the target (label view),
    q_t the input of the trained model (test view). With W', b' the state before the current
    mini-batch and s ≤ t its tokens so far (TTT, Eq. 4-8; Vision-TTT, Eq. 1-7; row vectors)::

        z_s = k_s W' + b'
        g_s = ∂/∂z_s ½‖f(k_s) − v_s‖²
        W_t = W' − p_t Σ_{s≤t} η_s k_sᵀ g_s,    b_t = b' − p_t Σ_{s≤t} η_s g_s
        o_t = f(q_t; W_t, b_t)

    where f(x) = x + LN(x W + b) with an inner norm and f(x) = x W + b without. The papers' loss has
    no ½: their η is ``eta / 2``.

    Args:
        q, k, v: test, training and label views [B, T, H, d], all float32, bfloat16, float16 or
            float64; any strides with a contiguous last axis.
        eta: inner learning rate of each token's gradient [B, T, H], ≥ 0.
        w0: initial weights [H, d, d], or one for each sequence [B, H, d, d].
        b0: initial bias [H, d] or [B, H, d].
        ln_weight, ln_bias: inner LayerNorm [H, d], or both None for no norm and no residual.
        mini_batch_size: tokens per gradient step, b ≥ 1. The last mini-batch may be short;
            b ≥ T is batch gradient descent, b = 1 online.
        position_scale: p_j [b], or [H, b] per head, multiplies the summed update that the j-th
            token of a mini-batch sees; None for all ones. A short mini-batch of n tokens uses
            p_1 … p_n.
        reverse_heads: the last this-many heads scan the tokens from T to 1.
        eps: added to the inner norm's variance.
        state: state that an earlier call returned, after any token. The tokens of this call are the
            next ones, and the initial state is not used. The outputs and gradients of both calls
            together equal those of one call on all tokens.
        lengths: tokens of each sequence in this call [B], whole numbers; the state is the one
            after the last of them. What is behind them is padding: its values, NaN or not, are not
            read, its outputs and gradients are 0. None: T. Reverse heads begin at the last token
            of each sequence.
        return_state: return ``(o, state)``, a :class:`LinearState` after the last token.
        backend: "cpu" (compiled kernels), "triton" (kernels for CUDA), "dual" (PyTorch's matrix
            products, any device) or "reference" (primal form, differentiated by autograd). None
            selects the fastest that supports the call, and the reference under torch.func
            transforms and forward-mode derivatives. See :func:`vision_ttt.ops.use_backend`.

    Returns:
        o [B, T, H, d] in q's dtype; with ``return_state`` also the :class:`LinearState`, in
        float32 (float64 where q is). Differentiable in every tensor argument; a
        second derivative (``create_graph=True``) is the definition's, with a state per token.

    Raises:
        TypeError: a dtype or type is not among those above.
        ValueError: a tensor's shape or device does not fit, the state's included, its storage has
            been freed, or the requested backend is unknown or does not support the call.
    """
    tensors = (q, k, v, eta, w0, b0, ln_weight, ln_bias, position_scale)
    inputs = Inputs(*tensors, mini_batch_size, reverse_heads, eps)
    return run_learner(
        *(OP, PART, CONTRACTS.state, LinearState, inputs, state, backend),
        return_state=return_state,
        lengths=lengths,
    )
