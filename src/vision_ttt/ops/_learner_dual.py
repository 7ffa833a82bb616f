"""The learner ops in their dual form: only matrix products, no per-token weights.

Papers: TTT, Sec. 2.5, Eq. 7-8 and Appendix A.3-A.4; Vision-TTT, Appendix A.2. Per head, layer of
the inner model and mini-batch of n tokens: with X the layer's inputs on training views, X_q those
on test views, G the rows η_t ∂loss_t/∂z_t, P = diag(p) and A the lower triangle of X_q Xᵀ + 1 (the
1 carries the bias):

    Z_q = X_q W + b - P A G
    W ← W - p_n Xᵀ G,    b ← b - p_n Σ G

The ops' READMEs derive the backward pass. It recomputes every intermediate from the states that the
forward pass saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops._learner_inner_model import (
    InnerNorm,
    gelu,
    gelu_derivative,
    gelu_second_derivative,
    inner_gradient_backward,
    inner_output,
    inner_output_backward,
    inner_step,
    layers_of,
)
from vision_ttt.ops._learner_scan_order import mini_batches, put, take
from vision_ttt.ops._registration import Backend

Tensors = tuple[Tensor, ...]
"""A state: W [B, H, i, j] and b [B, H, j] of every layer."""


class Part(NamedTuple):
    """n tokens of one mini-batch, which need not be complete: q, k, v [B, H, n, d] and η [B, H, n].

    ``p`` is the tokens' position scale: [H or 1, n, 1], or [B, H or 1, n, 1] if the sequences are
    at different positions.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    eta: Tensor
    p: Tensor


def initial_state(inputs: Any) -> Tensors:
    """The initial state among the inputs, with or without its axis B."""
    return inputs[4:-6]


def with_batch(state: Sequence[Tensor], batch: int) -> Tensors:
    """The tensors of a state [H, …] or [B, H, …], all with B."""
    ranks = (3, 2) * (len(state) // 2)  # of a weight and of a bias, [H] included
    return tuple(x.expand(batch, *x.shape[-n:]) for x, n in zip(state, ranks, strict=True))


def uniform(state: Sequence[Tensor], batch: int) -> Tensors:
    """The tensors of a state, all with B if one of them has it."""
    ranks = (3, 2) * (len(state) // 2)
    mixed = len({x.ndim - n for x, n in zip(state, ranks, strict=True)}) > 1
    return with_batch(state, batch) if mixed else tuple(state)


def checkpoint_interval(dim: int, mini_batch_size: int, layers: int = 1) -> int:
    """The number of mini-batches between two saved states: at least 4 d tokens per layer.

    A saved state has d² numbers with one layer, and 8 d² with two. All saved states take at most a
    quarter of the memory of a view with one layer, and about the memory of a view with two. The
    backward pass holds the states of one interval.
    """
    return 4 * layers * -(-dim // mini_batch_size)


def num_checkpoints(length: int, dim: int, mini_batch_size: int, layers: int = 1) -> int:
    """The number of states that a forward pass saves. It does not save the initial state."""
    tokens_per_state = mini_batch_size * checkpoint_interval(dim, mini_batch_size, layers)
    return (length - 1) // tokens_per_state


def after(state: Sequence[Tensor], sums: Sequence[Tensor], p: Tensor) -> Tensors:
    """θ - p Σ for p [H or 1] or [B, H or 1]."""
    pairs = zip(state, sums, strict=True)
    return tuple(x - p.reshape(*p.shape, *[1] * (x.ndim - 2)) * s for x, s in pairs)


class _Layer(NamedTuple):
    """A layer on one mini-batch: X_q, X [B, H, n, i], G [B, H, n, j], W before it, P, A and A G.

    ``z_q`` is Z_q [B, H, n, j].
    """

    x_q: Tensor
    x: Tensor
    step: Tensor
    w: Tensor
    p: Tensor
    attention: Tensor
    update: Tensor
    z_q: Tensor


def _read(x_q: Tensor, x: Tensor, step: Tensor, w: Tensor, b: Tensor, p: Tensor) -> _Layer:
    """Apply a layer to the test views, each with the weights after the step of its own token."""
    attention = (x_q @ x.transpose(-1, -2) + 1).tril()  # [B, H, n, n]
    update = attention @ step
    return _Layer(x_q, x, step, w, p, attention, update, x_q @ w + b - p * update)


def mini_batch(
    part: Part, start: Tensors, sums: Tensors | None, norm: InnerNorm | None
) -> tuple[Tensor, Tensors]:
    """o [B, H, n, d] of tokens of one mini-batch, and Σ η_s ∂ℓ_s/∂θ' after them.

    S and s are a layer's sums over the tokens before these. ``sums`` is None if there are none::

        Z_q = X_q W + b − P (A G + X_q S + s),    S ← S + Xᵀ G,    s ← s + Σ G
    """
    q, k, v, eta, p = part
    layers = layers_of(start)
    inner = inner_step(k, v, layers, norm)
    z_q, found = q, []
    for i, (w, b) in enumerate(layers):
        x_q, x, step = gelu(z_q) if i else q, inner.x[i], eta.unsqueeze(-1) * inner.g[i]
        z_q = _read(x_q, x, step, w, b, p).z_q
        of_w, of_b = x.transpose(-1, -2) @ step, step.sum(2)
        if sums is not None:
            z_q = z_q - p * (x_q @ sums[2 * i] + sums[2 * i + 1].unsqueeze(2))
            of_w, of_b = sums[2 * i] + of_w, sums[2 * i + 1] + of_b
        found += [of_w, of_b]
    return inner_output(q, z_q, norm), tuple(found)


class _Problem:
    """A call's tensors by mini-batch, in at least float32."""

    def __init__(self, inputs: Any) -> None:
        self.inputs, q = inputs, inputs.q
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.pieces = list(mini_batches(q.shape[1], inputs.mini_batch_size))
        state = initial_state(inputs)
        self.interval = checkpoint_interval(q.shape[-1], inputs.mini_batch_size, len(state) // 2)
        self.first = with_batch([x.to(self.dtype) for x in state], len(q))
        self.norm = InnerNorm.of(inputs.ln_weight, inputs.ln_bias, inputs.eps, self.dtype)

    def load(self, start: int, stop: int, *tensors: Tensor) -> list[Tensor]:
        """Tokens of tensors [B, T, H, …] as [B, H, n, …]."""
        return [take(x, start, stop, self.inputs.reverse_heads).to(self.dtype) for x in tensors]

    def part(self, start: int, stop: int) -> Part:
        x, n = self.inputs, stop - start
        if x.position_scale is None:
            p = x.q.new_ones(1, n, 1, dtype=self.dtype)
        else:
            p = x.position_scale.to(self.dtype)[..., :n].reshape(-1, n, 1)
        return Part(*self.load(start, stop, x.q, x.k, x.v, x.eta), p)


def learner_dual(inputs: Any, save_states: bool) -> Tensors:
    """Compute o [B, T, H, d], the last state [B, …], and the saved states [N, B, …].

    N = 0 unless ``save_states``.
    """
    problem, kept = _Problem(inputs), []
    state, o = problem.first, inputs.q.new_empty(inputs.q.shape)
    for index, (start, stop) in enumerate(problem.pieces):
        if save_states and index and index % problem.interval == 0:
            kept.append(state)
        part = problem.part(start, stop)
        o_t, sums = mini_batch(part, state, None, problem.norm)
        put(o, o_t.to(o.dtype), start, stop, inputs.reverse_heads)
        state = after(state, sums, part.p[:, -1, 0])
    if kept:
        saved = [torch.stack(x) for x in zip(*kept, strict=True)]
    else:
        saved = [x.new_empty(0, *x.shape) for x in problem.first]
    # Elementwise results inherit the strides of the initial state, but the op returns contiguous
    # tensors.
    return o, *(x.contiguous() for x in state), *saved


class _LayerBackward(NamedTuple):
    """Gradients of a scalar with respect to a layer's tensors, W and b before the mini-batch.

    ``scale`` [H, n] is the gradient of the position scale.
    """

    x_q: Tensor
    x: Tensor
    step: Tensor
    w: Tensor
    b: Tensor
    scale: Tensor | None


def _layer_backward(
    dz_q: Tensor, dw: Tensor, db: Tensor, layer: _Layer, scaled: bool
) -> _LayerBackward:
    """Pull the gradients of Z_q and of W, b [B, H, 1, j] *after* the mini-batch back."""
    x_q, x, step, w, p, attention, update, _ = layer
    p_last = p[:, -1:]

    # Z_q = X_q W + b - P A G
    dupdate = -p * dz_q
    dattention = (dupdate @ step.transpose(-1, -2)).tril()

    # W ← W - p_n Xᵀ G, b ← b - p_n Σ G
    x_dw = x @ dw + db  # [B, H, n, j]
    dscale = None
    if scaled:
        dscale = -(dz_q * update).sum((0, 3))
        dscale[:, -1] -= (x_dw * step).sum((0, 2, 3))
    return _LayerBackward(
        x_q=dz_q @ w.transpose(-1, -2) + dattention @ x,
        x=dattention.transpose(-1, -2) @ x_q - p_last * (step @ dw.transpose(-1, -2)),
        step=attention.transpose(-1, -2) @ dupdate - p_last * x_dw,
        w=dw + x_q.transpose(-1, -2) @ dz_q,
        b=db + dz_q.sum(2, keepdim=True),
        scale=dscale,
    )


def learner_dual_backward(inputs: Any, grad_o: Tensor, *grads_and_kept: Tensor) -> Tensors:
    """Pull the gradients of o and of the last state back to the tensors from q to position_scale.

    Args:
        inputs: the op's.
        grad_o: [B, T, H, d].
        grads_and_kept: gradients of the last state's tensors, then the saved states.

    Returns:
        A gradient for each tensor, in its dtype and shape; an empty tensor for None.
    """
    problem = _Problem(inputs)
    q, k, v, eta, *_, position_scale, size, reverse_heads, _ = inputs
    norm = problem.norm
    count = len(grads_and_kept) // 2
    grads, kept = grads_and_kept[:count], grads_and_kept[count:]
    dq, dk, dv, deta = (x.new_empty(x.shape) for x in (q, k, v, eta))
    dstate = layers_of([x.to(problem.dtype) for x in grads])
    heads, dim = q.shape[2:]
    dweight, dbias, dscale = (
        q.new_zeros(heads, n, dtype=problem.dtype)
        for n in (dim, dim, 0 if position_scale is None else size)
    )
    for segment in reversed(range(0, len(problem.pieces), problem.interval)):
        # Replay the segment's states from the saved one.
        members = problem.pieces[segment : segment + problem.interval]
        index = segment // problem.interval - 1
        states = [problem.first]
        if segment:
            states = [tuple(x[index].to(problem.dtype) for x in kept)]
        for piece in members[:-1]:
            part = problem.part(*piece)
            inner = inner_step(part.k, part.v, layers_of(states[-1]), norm)
            steps = [part.eta.unsqueeze(-1) * g for g in inner.g]
            pairs = zip(inner.x, steps, strict=True)
            sums = [s for x, g in pairs for s in (x.transpose(-1, -2) @ g, g.sum(2))]
            states.append(after(states[-1], sums, part.p[:, -1, 0]))

        for (start, stop), state in zip(reversed(members), reversed(states), strict=True):
            q_t, k_t, v_t, eta_t, p_t = problem.part(start, stop)
            (do_t,) = problem.load(start, stop, grad_o)
            eta_t = eta_t.unsqueeze(-1)

            # The forward pass, again.
            layers, read = layers_of(state), []
            inner = inner_step(k_t, v_t, layers, norm)
            for x, g, (w, b) in zip(inner.x, inner.g, layers, strict=True):
                x_q = gelu(read[-1].z_q) if read else q_t
                read.append(_read(x_q, x, eta_t * g, w, b, p_t))

            # o = f(q), through all layers as the test views see them.
            through_f = inner_output_backward(do_t, read[-1].z_q, norm)
            dz_q, back = through_f.z, []
            for i in reversed(range(len(read))):
                found = _layer_backward(dz_q, *dstate[i], read[i], position_scale is not None)
                back.insert(0, found)
                if i:
                    dz_q = found.x_q * gelu_derivative(read[i - 1].z_q)
                if found.scale is not None:
                    dscale[:, : stop - start] += found.scale
            dq_t, dk_t = back[0].x_q, back[0].x
            if through_f.x is not None:
                dq_t = dq_t + through_f.x

            # G = η g in every layer; g1 = e1 σ'(z1) with e1 = g2 W2ᵀ
            deta_t = sum((of.step * g).sum(-1) for of, g in zip(back, inner.g, strict=True))
            dg, de = [eta_t * back[0].step], []
            for i in range(1, len(read)):
                de.append(dg[-1] * gelu_derivative(inner.z[i - 1]))
                dg.append(eta_t * back[i].step + de[-1] @ read[i].w)

            # g2 = g(z2, k, v), z2 = x2 W2 + b2, x2 = σ(z1), z1 = k W1 + b1
            through_g = inner_gradient_backward(dg[-1], inner.z[-1], k_t, v_t, norm)
            dz, of_layers = through_g.z, []
            for i in reversed(range(len(read))):
                dw = back[i].w + inner.x[i].transpose(-1, -2) @ dz
                if i:
                    dw = dw + de[i - 1].transpose(-1, -2) @ inner.g[i]
                of_layers.insert(0, (dw, back[i].b + dz.sum(2, keepdim=True)))
                dx = dz @ read[i].w.transpose(-1, -2)
                if i:
                    z = inner.z[i - 1]
                    bend = dg[i - 1] * inner.e[i - 1] * gelu_second_derivative(z)
                    dz = (back[i].x + dx) * gelu_derivative(z) + bend
            dstate, dk_t = of_layers, dk_t + dx
            if through_g.k is not None:
                dk_t = dk_t + through_g.k
            for through in (through_f, through_g):
                if through.norm_weight is not None and through.norm_bias is not None:
                    dweight += through.norm_weight
                    dbias += through.norm_bias
            for grad, piece in ((dq, dq_t), (dk, dk_t), (dv, through_g.v), (deta, deta_t)):
                put(grad, piece.to(grad.dtype), start, stop, reverse_heads)

    found = (*(x for dw, db in dstate for x in (dw, db.squeeze(2))), dweight, dbias, dscale)
    return dq, dk, dv, deta, *(summed(*pair, q) for pair in zip(found, inputs[4:-3], strict=True))


def summed(share: Tensor | None, like: Tensor | None, q: Tensor) -> Tensor:
    """A gradient's shares, summed to the shape of ``like`` in a fixed order; empty for None."""
    if share is None or like is None:
        return q.new_empty(0)
    single = share.numel() == like.numel()
    total = share.reshape(like.shape) if single else share.sum_to_size(like.shape)
    return total.to(like.dtype).contiguous()


BACKEND = Backend(learner_dual, learner_dual_backward, lambda inputs: None)
