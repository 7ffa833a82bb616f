"""The two-layer inner model: its activation's derivatives and the gradients of its loss.

    z1 = k W1 + b1,    x2 = GELU(z1),    z2 = x2 W2 + b2
    f(k) = k + LN(z2), or f(k) = z2 without inner norm
    loss = 1/2 ||f(k) - v||²

Shapes: k, v, z2 [B, H, n, d]; z1, x2 [B, H, n, 4d]. The part from z2 to the loss is TTT-Linear's,
see :mod:`vision_ttt.ops.ttt_linear.inner_model`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops.ttt_linear.inner_model import InnerNorm, inner_gradient

_FREQUENCY = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


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


class State(NamedTuple):
    """The inner model's weights: w1 [B, H, d, 4d], b1 [B, H, 1, 4d], w2 [B, H, 4d, d], b2."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    @classmethod
    def initial(
        cls, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, batch: int, dtype: torch.dtype
    ) -> State:
        """The op's state [H, …] or [B, H, …] for every image, biases as rows."""
        rows = w1, b1.unsqueeze(-2), w2, b2.unsqueeze(-2)
        return cls(*(x.to(dtype).expand(batch, *x.shape[-3:]) for x in rows))


class InnerStep(NamedTuple):
    """One pass forward and back through the inner model on training views k and labels v.

    ``g1`` and ``g2`` are the gradients of each token's loss with respect to its z1 and z2, ``e1``
    that with respect to its x2.
    """

    z1: Tensor
    x2: Tensor
    z2: Tensor
    g2: Tensor
    e1: Tensor
    g1: Tensor


def inner_step(k: Tensor, v: Tensor, state: State, norm: InnerNorm | None) -> InnerStep:
    """The gradients of every token's loss, all at the same state."""
    z1 = k @ state.w1 + state.b1
    x2 = gelu(z1)
    z2 = x2 @ state.w2 + state.b2
    g2 = inner_gradient(z2, k, v, norm)
    e1 = g2 @ state.w2.transpose(-1, -2)
    return InnerStep(z1, x2, z2, g2, e1, e1 * gelu_derivative(z1))
