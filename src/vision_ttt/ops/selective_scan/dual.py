"""selective_scan in chunks, by PyTorch's operations on any device.

All chunks of K = 64 tokens, or of all T where these are fewer, advance side by side, so that T
tokens take 2 K + T / K steps and not T:

    within chunk p, from zero:  h ← exp(δ A) h + δ u B       the share of the chunk's own tokens
    from chunk to chunk:        s_{p+1} = exp(A Σ δ) s_p + h
    within chunk p, from s_p:   the same recurrence, with outputs C h

The backward pass runs the transposed recurrence likewise, from the last chunk to the first. With
g_t the gradient of h_t, later tokens' share included:

    g_t = C_t ∂y_t + exp(δ_{t+1} A) g_{t+1}
    ∂C_t = Σ_channels h_t ∂y_t,   ∂B_t = Σ_channels δ_t u_t g_t,   ∂(δ u)_t = Σ_n B_t g_t
    ∂δ_t ∋ Σ_n A r_t,   ∂A = Σ_t δ_t r_t,   r_t = g_t exp(δ_t A) h_{t-1}

It computes the states anew from the saved ones, for a few chunks at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._op import Backend
from vision_ttt.ops.selective_scan.contract import (
    CHUNK_TOKENS,
    Inputs,
    Part,
    num_groups,
    parts,
)
from vision_ttt.ops.selective_scan.definition import softplus

_MOST_STATES = 1 << 23
"""Numbers in the states that the backward pass holds at a time."""


class _Scan(NamedTuple):
    """The channels of one direction in scan order, in P chunks of K tokens, G groups of M."""

    u: Tensor  # [B, P, K, G, M]
    delta: Tensor  # [B, P, K, G, M], zero beyond the last token, where the state then stays
    a: Tensor  # [G, M, N]
    b: Tensor  # [B, P, K, G, N]
    c: Tensor  # [B, P, K, G, N]

    def advance(self, h: Tensor, j: int) -> Tensor:
        """The states [B, P, G, M, N] after token j of every chunk, from those before it."""
        update = (self.delta[:, :, j] * self.u[:, :, j]).unsqueeze(-1) * self.b[:, :, j, :, None]
        return torch.addcmul(update, self.decay(j), h)

    def decay(self, j: int) -> Tensor:
        """exp(δ A) of token j of every chunk, [B, P, G, M, N]."""
        return torch.exp(self.delta[:, :, j].unsqueeze(-1) * self.a)

    def of_chunks(self) -> Tensor:
        """exp(A Σ δ) of every chunk, [B, P, G, M, N]."""
        return torch.exp(self.delta.sum(2).unsqueeze(-1) * self.a)

    def places(self) -> range:
        """The places of a chunk's tokens, 0 … K - 1."""
        return range(self.u.shape[2])

    def of(self, chunks: slice) -> _Scan:
        """Some of the chunks."""
        u, delta, b, c = (x[:, chunks] for x in (self.u, self.delta, self.b, self.c))
        return _Scan(u, delta, self.a, b, c)


def _chunked(x: Tensor, reverse: bool) -> Tensor:
    """x [B, T, …] in scan order as [B, P, K, …], zeros at the end."""
    length = x.shape[1]
    if reverse:
        x = x.flip(1)
    size = min(length, CHUNK_TOKENS)
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, -length % size))
    return x.unflatten(1, (-1, size))


def _unchunked(x: Tensor, length: int, reverse: bool) -> Tensor:
    """Undo :func:`_chunked`."""
    x = x.flatten(1, 2)[:, :length]
    return x.flip(1) if reverse else x


def _rows(x: Tensor) -> Tensor:
    """B or C as [B, T, G, N]."""
    return x if x.ndim == 4 else x.unsqueeze(2)


def _steps(inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """delta with its bias, and δ [B, T, D]."""
    raw = inputs.delta.to(dtype)
    if inputs.delta_bias is not None:
        raw = raw + inputs.delta_bias.to(dtype)
    return raw, softplus(raw) if inputs.delta_softplus else raw


def _scan_of(inputs: Inputs, delta: Tensor, part: Part) -> _Scan:
    dtype = delta.dtype
    groups = part.groups.stop - part.groups.start
    u, delta = (
        _chunked(x[:, :, part.channels].to(dtype), part.reverse).unflatten(-1, (groups, -1))
        for x in (inputs.u, delta)
    )
    b, c = (
        _chunked(_rows(x)[:, :, part.groups].to(dtype), part.reverse) for x in (inputs.B, inputs.C)
    )
    return _Scan(u, delta, inputs.A[part.channels].to(dtype).unflatten(0, (groups, -1)), b, c)


def _states(scan: _Scan, state: Tensor) -> tuple[Tensor, Tensor]:
    """The states before every chunk [B, P, G, M, N], and the last one [B, G, M, N]."""
    decay = scan.of_chunks()
    h = torch.zeros_like(decay)
    for j in scan.places():
        h = scan.advance(h, j)
    starts = []
    for p in range(decay.shape[1]):
        starts.append(state)
        state = torch.addcmul(h[:, p], decay[:, p], state)
    return torch.stack(starts, 1), state


def _outputs(scan: _Scan, starts: Tensor) -> Tensor:
    """C h of every token, [B, P, K, G, M]."""
    h, outputs = starts, []
    for j in scan.places():
        h = scan.advance(h, j)
        outputs.append((h * scan.c[:, :, j, :, None]).sum(-1))
    return torch.stack(outputs, 2)


def selective_scan_dual(inputs: Inputs, save_states: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute y [B, T, D], the last state [B, D, N], and the states that are saved [P, B, D, N].

    P = 0 unless ``save_states``.
    """
    u, channels = inputs.u, inputs.u.shape[2]
    dtype = torch.promote_types(u.dtype, torch.float32)
    _, delta = _steps(inputs, dtype)
    initial = _initial_state(inputs, dtype)
    ys, states, kept = [], [], []
    for part in parts(channels, num_groups(inputs.B), inputs.reverse_channels):
        scan = _scan_of(inputs, delta, part)
        starts, last = _states(scan, initial[:, part.channels].unflatten(1, scan.a.shape[:2]))
        y = _outputs(scan, starts).flatten(-2)
        ys.append(_unchunked(y, u.shape[1], part.reverse))
        states.append(last.flatten(1, 2))
        kept.append(starts.transpose(0, 1).flatten(2, 3))
    y = torch.cat(ys, -1)
    if inputs.D is not None:
        y = y + inputs.D.to(dtype) * u.to(dtype)
    if inputs.z is not None:
        y = y * F.silu(inputs.z.to(dtype))
    saved = torch.cat(kept, 2) if save_states else initial.new_empty(0, *initial.shape)
    return y.to(u.dtype).contiguous(), torch.cat(states, 1).contiguous(), saved.contiguous()


def _initial_state(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """[B, D, N]."""
    if inputs.initial_state is None:
        return inputs.u.new_zeros(inputs.u.shape[0], *inputs.A.shape, dtype=dtype)
    return inputs.initial_state.to(dtype)


class _Gradients(NamedTuple):
    """Of the channels of one direction; tokens in scan order and in chunks."""

    update: Tensor  # of δ u [B, P, K, G, M]
    delta: Tensor  # of δ in the decay [B, P, K, G, M]
    a: Tensor  # [G, M, N]
    b: Tensor  # [B, P, K, G, N]
    c: Tensor  # [B, P, K, G, N]
    state: Tensor  # of the initial state [B, G, M, N]
    y: Tensor  # no gradient, but C h [B, P, K, G, M], computed on the way


def _scan_backward(scan: _Scan, starts: Tensor, grad_y: Tensor, grad_state: Tensor) -> _Gradients:
    """Pull gradients of C h [B, P, K, G, M] and of the last state [B, G, M, N] back."""
    # The gradient of each chunk's last state: first what its own later chunk adds, from zero.
    decay = scan.of_chunks()
    g = torch.zeros_like(decay)
    for j in reversed(scan.places()):
        own = grad_y[:, :, j].unsqueeze(-1) * scan.c[:, :, j, :, None]
        g = (g + own) * scan.decay(j)
    ends = []
    for p in reversed(range(decay.shape[1])):
        ends.append(grad_state)
        grad_state = torch.addcmul(g[:, p], decay[:, p], grad_state)
    end = torch.stack(ends[::-1], 1)
    at_a_time = max(1, _MOST_STATES // max(1, decay[:, 0].numel() * len(scan.places())))
    pieces = []
    for first in range(0, decay.shape[1], at_a_time):
        chunks = slice(first, first + at_a_time)
        pieces.append(
            _within(scan.of(chunks), starts[:, chunks], grad_y[:, chunks], end[:, chunks])
        )
    a, *of_tokens = zip(*pieces, strict=True)
    update, delta, b, c, y = (torch.cat(x, 1) for x in of_tokens)
    return _Gradients(update, delta, torch.stack(a).sum(0), b, c, grad_state, y)


def _within(scan: _Scan, starts: Tensor, grad_y: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """The gradients of A, δ u, δ, B and C within chunks, and C h.

    g is the gradient of the chunks' last states, of which no token in them has taken account.
    """
    states = [starts]
    for j in scan.places():
        states.append(scan.advance(states[-1], j))
    updates, deltas, bs, cs, ys = [], [], [], [], []
    da = torch.zeros_like(scan.a)
    for j in reversed(scan.places()):
        c, dy, h = scan.c[:, :, j, :, None], grad_y[:, :, j].unsqueeze(-1), states.pop()
        delta = scan.delta[:, :, j].unsqueeze(-1)
        ys.append((h * c).sum(-1))
        cs.append((h * dy).sum(-2))
        g = g + c * dy
        updates.append((g * scan.b[:, :, j, :, None]).sum(-1))
        bs.append((g * delta * scan.u[:, :, j].unsqueeze(-1)).sum(-2))
        g = g * scan.decay(j)
        r = g * states[-1]
        deltas.append((r * scan.a).sum(-1))
        da += (r * delta).sum((0, 1))
    return da, *(torch.stack(x[::-1], 2) for x in (updates, deltas, bs, cs, ys))


def selective_scan_dual_backward(
    inputs: Inputs, grad_y: Tensor, grad_state: Tensor, kept: Tensor
) -> tuple[Tensor, ...]:
    """Pull gradients of y and the last state back to the nine tensors from u to initial_state.

    A gradient has the dtype and the shape of its tensor; the gradient of None is an empty tensor.
    """
    u, length = inputs.u, inputs.u.shape[1]
    dtype = torch.promote_types(u.dtype, torch.float32)
    raw, delta = _steps(inputs, dtype)
    gate = None if inputs.z is None else inputs.z.to(dtype)
    grad = grad_y.to(dtype)
    ungated = grad if gate is None else grad * F.silu(gate)  # the gradient of C h + D u
    wide = u.to(dtype)
    columns: dict[str, list[Tensor]] = {name: [] for name in ("update", "delta", "y", "a", "state")}
    db, dc = (_rows(x).new_zeros(_rows(x).shape, dtype=dtype) for x in (inputs.B, inputs.C))
    for part in parts(u.shape[2], num_groups(inputs.B), inputs.reverse_channels):
        scan = _scan_of(inputs, delta, part)
        sizes = scan.a.shape[:2]
        own = _chunked(ungated[:, :, part.channels], part.reverse).unflatten(-1, sizes)
        starts = kept[:, :, part.channels].to(dtype).transpose(0, 1).unflatten(2, sizes)
        last = grad_state[:, part.channels].to(dtype).unflatten(1, sizes)
        found = _scan_backward(scan, starts, own, last)
        for name in ("update", "delta", "y"):
            x = getattr(found, name).flatten(-2)
            columns[name].append(_unchunked(x, length, part.reverse))
        columns["a"].append(found.a.flatten(0, 1))
        columns["state"].append(found.state.flatten(1, 2))
        db[:, :, part.groups] += _unchunked(found.b, length, part.reverse)
        dc[:, :, part.groups] += _unchunked(found.c, length, part.reverse)
    update, through_decay, y = (torch.cat(columns[name], -1) for name in ("update", "delta", "y"))
    du = update * delta
    ddelta = through_decay + update * wide
    if inputs.D is not None:
        du = du + inputs.D.to(dtype) * ungated
        y = y + inputs.D.to(dtype) * wide
    if inputs.delta_softplus:
        ddelta = ddelta * torch.sigmoid(raw)

    def of(gradient: Tensor, like: Tensor | None) -> Tensor:
        if like is None:
            return u.new_empty(0)
        return gradient.reshape(like.shape).to(like.dtype).contiguous()

    dz = grad if gate is None else grad * y * _silu_derivative(gate)
    return (
        of(du, u),
        of(ddelta, inputs.delta),
        of(torch.cat(columns["a"], 0), inputs.A),
        of(db, inputs.B),
        of(dc, inputs.C),
        of((ungated * wide).sum((0, 1)), inputs.D),
        of(dz, inputs.z),
        of(ddelta.sum((0, 1)), inputs.delta_bias),
        of(torch.cat(columns["state"], 1), inputs.initial_state),
    )


def _silu_derivative(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


BACKEND = Backend(selective_scan_dual, selective_scan_dual_backward, lambda inputs: None)
