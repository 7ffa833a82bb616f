"""The public function of selective_scan and its registration."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from vision_ttt.ops._op import Op
from vision_ttt.ops._torch_function import overridable
from vision_ttt.ops.padding import fill_padding, padding_of
from vision_ttt.ops.selective_scan import cpu, dual, triton_backend
from vision_ttt.ops.selective_scan.contract import (
    BACKWARD_CONTRACT,
    CONTRACT,
    Inputs,
    num_chunks,
)
from vision_ttt.ops.selective_scan.definition import selective_scan_definition
from vision_ttt.ops.selective_scan.scan import selective_scan_loop

_NO_STEP = -1e4
"""A step size's logit whose softplus, with any bias, and its derivative are 0; float16 has it."""


def _num_kept(inputs: Inputs) -> int:
    return num_chunks(inputs.u.shape[1])


def _fake(inputs: Inputs, save_states: bool) -> tuple[Tensor, Tensor, Tensor]:
    u = inputs.u
    dtype = torch.promote_types(u.dtype, torch.float32)
    state = (u.shape[0], *inputs.A.shape)
    count = _num_kept(inputs) if save_states else 0
    return (
        u.new_empty(u.shape),
        u.new_empty(state, dtype=dtype),
        u.new_empty(count, *state, dtype=dtype),
    )


def selective_scan_flops(shapes: Inputs) -> int:
    """Per token, channel and state: δ A, its exponential, δ u B, the recurrence and C h."""
    batch, length, channels = shapes.u
    return batch * length * channels * 7 * shapes.A[-1]


_TENSORS = (
    "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
    "Tensor? delta_bias, Tensor? initial_state"
)
_OPTIONS = "bool delta_softplus, SymInt reverse_channels"
_GRADIENTS = _TENSORS.replace("?", "").replace("Tensor ", "Tensor d")
OP = Op(
    "selective_scan",
    Inputs,
    CONTRACT,
    selective_scan_definition,
    {"cpu": cpu.BACKEND, "triton": triton_backend.BACKEND, "dual": dual.BACKEND},
    _fake,
    schema=f"({_TENSORS}, {_OPTIONS}, bool save_states, str backend) "
    "-> (Tensor y, Tensor last_state, Tensor kept_states)",
    backward_schema=f"(Tensor grad_y, Tensor grad_state, {_TENSORS}, Tensor kept_states, "
    f"{_OPTIONS}, str backend) -> ({_GRADIENTS})",
    backward_contract=BACKWARD_CONTRACT,
    results=2,
    kept=_num_kept,
    autocast=("u", "delta", "B", "C", "z"),
    exported=selective_scan_loop,
    flops=selective_scan_flops,
    # The recurrence again, its transpose, and a product for each gradient.
    backward_flops=lambda shapes: 3 * selective_scan_flops(shapes),
)


@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = ...,
    z: Tensor | None = ...,
    delta_bias: Tensor | None = ...,
    *,
    delta_softplus: bool = ...,
    reverse_channels: int = ...,
    initial_state: Tensor | None = ...,
    lengths: Tensor | None = ...,
    return_state: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = ...,
    z: Tensor | None = ...,
    delta_bias: Tensor | None = ...,
    *,
    delta_softplus: bool = ...,
    reverse_channels: int = ...,
    initial_state: Tensor | None = ...,
    lengths: Tensor | None = ...,
    return_state: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overridable
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    delta_softplus: bool = False,
    reverse_channels: int = 0,
    initial_state: Tensor | None = None,
    lengths: Tensor | None = None,
    return_state: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scan the tokens by a linear recurrence whose coefficients depend on them.

    Per channel, with a state h of N numbers (Mamba, Gu and Dao 2023, Eq. 2a, 2b and Algorithm 2; B
    is discretised as δ B)::

        δ_t = softplus(delta_t + delta_bias)       as far as asked for
        h_t = exp(δ_t A) h_{t-1} + δ_t B_t u_t
        y_t = (C_t · h_t + D u_t) SiLU(z_t)        D and the gate z where they are given

    The last ``reverse_channels`` channels scan from T to 1: both directions of a bidirectional
    model are channels of one call, and nothing is flipped.

    Args:
        u: the tokens [B, T, D], of any strides; float32, bfloat16, float16 or float64.
        delta: the step sizes [B, T, D], or what they are computed from.
        A: [D, N], negative where the state is to fade.
        B, C: input and output vectors [B, T, N], or [B, T, G, N] for G groups of D / G neighbouring
            channels each. The channels of a group scan in one direction, unless G is 1.
        D: share of the token itself [D], or None.
        z: the gate's logits [B, T, D], or None.
        delta_bias: [D], added to delta, or None.
        delta_softplus: apply softplus to delta.
        reverse_channels: the number of channels, at the end, that scan from T to 1.
        initial_state: h before the first token in scan order [B, D, N]; None for zeros.
        lengths: tokens of each sequence [B], whole numbers. What is behind them is padding: its
            values, NaN or not, are not read, its outputs and gradients are 0. Each direction begins
            and ends at a sequence's own tokens. None: T.
        return_state: return ``(y, h)`` with the state after the last token.
        backend: "cpu" (compiled kernels), "triton" (kernels for CUDA), "dual" (chunks of tokens
            side by side, any device) or "reference" (token by token, differentiated by autograd).
            None selects the fastest that supports the call, and the reference under torch.func
            transforms and forward-mode derivatives. See :func:`vision_ttt.ops.use_backend`.

    Returns:
        y [B, T, D] in u's dtype; with ``return_state`` also h [B, D, N] in float32 (float64 where
        u is). Differentiable in every tensor argument. The backward pass computes the states anew
        from one per 64 tokens, so that saved memory is linear in B T D.

    Raises:
        TypeError: a dtype or type is not accepted; u, delta, B, C and z must share a dtype, and
            lengths must be whole numbers.
        ValueError: a shape does not fit, or the requested backend is unknown or does not support
            the call.
    """
    tensors = (u, delta, A, B, C, D, z, delta_bias, initial_state)
    inputs = Inputs(*tensors, delta_softplus, reverse_channels)
    padding = None
    if lengths is not None:
        CONTRACT.check(inputs)
        padding = padding_of(OP.name, lengths, u)
        inputs = _without(inputs, padding)
    y, state = OP(inputs, backend)
    y = fill_padding(y, padding)
    return (y, state) if return_state else y


def _without(x: Inputs, padding: Tensor) -> Inputs:
    """Inputs whose padding [B, T] leaves the state as it is: u = B = C = z = 0 there, and δ = 0."""
    tokens = {name: fill_padding(getattr(x, name), padding) for name in ("u", "B", "C")}
    if x.z is not None:
        tokens["z"] = fill_padding(x.z, padding)
    delta, bias = x.delta, x.delta_bias
    if bias is not None and not x.delta_softplus:
        # Added here, because in half precisions no number of delta may cancel the bias.
        delta, bias = (delta + bias).to(delta.dtype), None
    delta = fill_padding(delta, padding, _NO_STEP if x.delta_softplus else 0)
    return x._replace(**tokens, delta=delta, delta_bias=bias)
