"""One linear layer of an inner model in dual form, and its derivative.

TTT, Appendix A.3 and A.4. Per head and mini-batch of n tokens: with X the layer's inputs on
training views, X_q those on test views, G the rows η_t ∂loss_t/∂z_t, P = diag(p) and A the lower
triangle of X_q Xᵀ + 1 (the 1 carries the bias):

    Z_q = X_q W + b - P A G
    W ← W - p_n Xᵀ G,    b ← b - p_n Σ G
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Layer(NamedTuple):
    """A layer of the inner model on one mini-batch: X_q, X [B, H, n, i], G [B, H, n, j], W, b, P.

    The weights are those before the mini-batch, p is [H or 1, n, 1].
    """

    x_q: Tensor
    x: Tensor
    step: Tensor
    w: Tensor
    b: Tensor
    p: Tensor


class Reading(NamedTuple):
    """A layer's results for the test views: A, A G and Z_q."""

    attention: Tensor
    update: Tensor
    z_q: Tensor


def read(layer: Layer) -> Reading:
    """Z_q = X_q W + b - P A G: every test view with the weights of its own token."""
    attention = (layer.x_q @ layer.x.transpose(-1, -2) + 1).tril()  # [B, H, n, n]
    update = attention @ layer.step
    return Reading(attention, update, layer.x_q @ layer.w + layer.b - layer.p * update)


def write(x: Tensor, step: Tensor, w: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """W and b after the mini-batch: W - p_n Xᵀ G and b - p_n Σ G."""
    p_last = p[:, -1:]  # [H or 1, 1, 1]
    return w - p_last * (x.transpose(-1, -2) @ step), b - p_last * step.sum(2, keepdim=True)


class LayerBackward(NamedTuple):
    """Gradients of a scalar with respect to a layer's tensors, W and b before the mini-batch.

    ``scale`` [H, n] is the gradient of the position scale.
    """

    x_q: Tensor
    x: Tensor
    step: Tensor
    w: Tensor
    b: Tensor
    scale: Tensor


def layer_backward(
    grad_z_q: Tensor, grad_w: Tensor, grad_b: Tensor, layer: Layer, reading: Reading
) -> LayerBackward:
    """Pull the gradients of Z_q and of W, b *after* the mini-batch back through read and write."""
    x_q, x, step, w, _, p = layer
    p_last = p[:, -1:]

    # Z_q = X_q W + b - P A G
    grad_update = -p * grad_z_q
    grad_attention = (grad_update @ step.transpose(-1, -2)).tril()

    # W ← W - p_n Xᵀ G, b ← b - p_n Σ G
    x_grad_w = x @ grad_w + grad_b  # [B, H, n, j]
    scale = -(grad_z_q * reading.update).sum((0, 3))  # [H, n]
    scale[:, -1] -= (x_grad_w * step).sum((0, 2, 3))
    return LayerBackward(
        x_q=grad_z_q @ w.transpose(-1, -2) + grad_attention @ x,
        x=grad_attention.transpose(-1, -2) @ x_q - p_last * (step @ grad_w.transpose(-1, -2)),
        step=reading.attention.transpose(-1, -2) @ grad_update - p_last * x_grad_w,
        w=grad_w + x_q.transpose(-1, -2) @ grad_z_q,
        b=grad_b + grad_z_q.sum(2, keepdim=True),
        scale=scale,
    )
