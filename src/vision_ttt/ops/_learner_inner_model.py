"""The inner models of the learner ops, and the gradients of their losses in closed form.

    f(x) = x + LN(z) with z = x W + b, or f(x) = z without inner norm                TTT-Linear
    the same with z = GELU(x W1 + b1) W2 + b2                                        TTT-MLP
    loss = 1/2 ||f(k) - v||²

Shapes: x, z, k, v [B, H, n, d]; the norm's weight and bias [H, 1, d]. The READMEs of both ops
derive the formulas, and tests compare them with automatic differentiation of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_FREQUENCY = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


class InnerNorm(NamedTuple):
    """Per-head LayerNorm parameters [H, 1, d] in the compute dtype."""

    weight: Tensor
    bias: Tensor
    eps: float

    @classmethod
    def of(
        cls, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
    ) -> InnerNorm | None:
        """The norm with the parameters [H, d], or None where the inner model has none."""
        if weight is None or bias is None:
            return None
        return cls(weight.to(dtype).unsqueeze(1), bias.to(dtype).unsqueeze(1), eps)


def standardise(z: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return z with mean 0 and variance 1 along its last axis, and 1 / standard deviation."""
    centred = z - z.mean(-1, keepdim=True)
    inverse_std = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * inverse_std, inverse_std


def remove_norm_directions(g: Tensor, x_hat: Tensor) -> Tensor:
    """P g = g - mean(g) - x̂ mean(g x̂): the part of g that keeps x̂'s mean and variance."""
    return g - g.mean(-1, keepdim=True) - x_hat * (g * x_hat).mean(-1, keepdim=True)


def inner_output(x: Tensor, z: Tensor, norm: InnerNorm | None) -> Tensor:
    """f(x), given z = x W + b."""
    if norm is None:
        return z
    x_hat, _ = standardise(z, norm.eps)
    return x + x_hat * norm.weight + norm.bias


def inner_gradient(z: Tensor, k: Tensor, v: Tensor, norm: InnerNorm | None) -> Tensor:
    """g = ∂/∂z 1/2 ||f(k) - v||², given z = k W + b."""
    if norm is None:
        return z - v
    x_hat, inverse_std = standardise(z, norm.eps)
    error = k + x_hat * norm.weight + norm.bias - v
    return remove_norm_directions(error * norm.weight, x_hat) * inverse_std


class OutputBackward(NamedTuple):
    """Gradients of a scalar through :func:`inner_output`; norm gradients summed over B and n."""

    z: Tensor
    x: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None


def inner_output_backward(grad: Tensor, z: Tensor, norm: InnerNorm | None) -> OutputBackward:
    """Pull the gradient of f(x) back to z, x and the norm's parameters [H, d]."""
    if norm is None:
        return OutputBackward(grad, None, None, None)
    x_hat, inverse_std = standardise(z, norm.eps)
    grad_z = remove_norm_directions(grad * norm.weight, x_hat) * inverse_std
    return OutputBackward(grad_z, grad, (grad * x_hat).sum((0, 2)), grad.sum((0, 2)))


class GradientBackward(NamedTuple):
    """Gradients of a scalar through :func:`inner_gradient`; norm gradients summed over B and n."""

    z: Tensor
    k: Tensor | None
    v: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None


def inner_gradient_backward(
    grad: Tensor, z: Tensor, k: Tensor, v: Tensor, norm: InnerNorm | None
) -> GradientBackward:
    """Pull the gradient of g back to z, k, v and the norm's parameters [H, d].

    With r = 1/std, e = f(k) - v, u = e γ and a the incoming gradient of g = r P u, where the
    projection P depends on x̂:

        ∂u = r P a
        ∂x̂ = -r (a mean(u x̂) + u mean(a x̂)) + γ² ∂u,    since e contains γ x̂
        ∂z = r (P ∂x̂ - x̂ mean(a g)),                     the last term from r itself
    """
    if norm is None:
        return GradientBackward(grad, None, -grad, None, None)
    x_hat, inverse_std = standardise(z, norm.eps)
    error = k + x_hat * norm.weight + norm.bias - v
    u = error * norm.weight
    g = remove_norm_directions(u, x_hat) * inverse_std

    grad_u = remove_norm_directions(grad, x_hat) * inverse_std
    grad_error = grad_u * norm.weight
    grad_x_hat = grad_error * norm.weight - inverse_std * (
        grad * (u * x_hat).mean(-1, keepdim=True) + u * (grad * x_hat).mean(-1, keepdim=True)
    )
    through_std = x_hat * (grad * g).mean(-1, keepdim=True)
    grad_z = inverse_std * (remove_norm_directions(grad_x_hat, x_hat) - through_std)
    grad_weight = (grad_u * error + grad_error * x_hat).sum((0, 2))
    return GradientBackward(grad_z, grad_error, -grad_error, grad_weight, grad_error.sum((0, 2)))


def gelu(z: Tensor) -> Tensor:
    """σ(z) = z/2 (1 + tanh u) with u = √(2/π) (z + 0.044715 z³)."""
    return F.gelu(z, approximate="tanh")


def _tanh_and_slope(z: Tensor) -> tuple[Tensor, Tensor]:
    """t = tanh u and u' = √(2/π) (1 + 3 · 0.044715 z²)."""
    square = z.square()
    t = torch.tanh(_FREQUENCY * z * (1 + _CUBIC * square))
    return t, _FREQUENCY * (1 + 3 * _CUBIC * square)


def gelu_derivative(z: Tensor) -> Tensor:
    """σ'(z) = (1 + t)/2 + z/2 (1 − t²) u'."""
    t, slope = _tanh_and_slope(z)
    return 0.5 * (1 + t) + 0.5 * z * (1 - t.square()) * slope


def gelu_second_derivative(z: Tensor) -> Tensor:
    """σ''(z) = (1 − t²) (u' + z/2 u'' − z t u'²), with u'' = 6 · 0.044715 √(2/π) z."""
    t, slope = _tanh_and_slope(z)
    bend = 6 * _CUBIC * _FREQUENCY * z
    return (1 - t.square()) * (slope + 0.5 * z * bend - z * t * slope.square())


def layers_of(state: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """W [B, H, i, j] and b [B, H, 1, j] of each layer; a state has b [B, H, j]."""
    return [(w, b.unsqueeze(-2)) for w, b in zip(state[::2], state[1::2], strict=True)]


class InnerStep(NamedTuple):
    """One pass forward and back through the inner model on training views k and labels v.

    Each list has one tensor per layer: its input x, its output z, and the gradient g of each
    token's loss with respect to z. ``e`` holds the gradients with respect to x, of all layers but
    the first.
    """

    x: list[Tensor]
    z: list[Tensor]
    g: list[Tensor]
    e: list[Tensor]


def inner_step(
    k: Tensor, v: Tensor, layers: Sequence[tuple[Tensor, Tensor]], norm: InnerNorm | None
) -> InnerStep:
    """Compute the gradients of every token's loss at one state, given as by :func:`layers_of`."""
    x, z = [], []
    for w, b in layers:
        x.append(gelu(z[-1]) if z else k)
        z.append(x[-1] @ w + b)
    g, e = [inner_gradient(z[-1], k, v, norm)], []
    for (w, _), before in zip(reversed(layers[1:]), reversed(z[:-1]), strict=True):
        e.insert(0, g[0] @ w.transpose(-1, -2))
        g.insert(0, e[0] * gelu_derivative(before))
    return InnerStep(x, z, g, e)
