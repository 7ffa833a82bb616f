"""Inner training losses of a batch of predictions V̂ and targets V, both [n, d].

Equation numbers are those of ViT³'s supplement, Sec. 2. The projection to V gets a gradient through
the inner training only where the mixed second derivative ∂²L/∂V∂V̂ is not zero; tests check its
closed forms (Eq. 2, 4, 6, 8, 10).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]
"""(prediction [n, d], target [n, d]) → a scalar."""


def _scale(x: Tensor) -> float:
    """n √d for x [n, d]: the mean over tokens, scaled as dot products are in attention."""
    return x.shape[0] * math.sqrt(x.shape[1])


def dot_product(prediction: Tensor, target: Tensor) -> Tensor:
    """−1/(n √d) Σᵢ V̂ᵢ·Vᵢ (Eq. 1), the loss of the published ViT³."""
    return -(prediction * target).sum() / _scale(prediction)


def mse(prediction: Tensor, target: Tensor) -> Tensor:
    """1/(2 n √d) Σᵢ ‖V̂ᵢ − Vᵢ‖² (Eq. 3)."""
    return 0.5 * (prediction - target).square().sum() / _scale(prediction)


def rmse(prediction: Tensor, target: Tensor) -> Tensor:
    """√(1/(n √d) Σᵢ ‖V̂ᵢ − Vᵢ‖²) (Eq. 5); not differentiable where all predictions are exact."""
    return torch.sqrt((prediction - target).square().sum() / _scale(prediction))


def mae(prediction: Tensor, target: Tensor) -> Tensor:
    """1/(n √d) Σᵢ ‖V̂ᵢ − Vᵢ‖₁ (Eq. 7)."""
    return (prediction - target).abs().sum() / _scale(prediction)


def smooth_l1(prediction: Tensor, target: Tensor) -> Tensor:
    """1/(n √d) Σᵢⱼ ℓ(V̂ᵢⱼ − Vᵢⱼ), ℓ(x) = x²/2 where |x| < 1 and |x| − 1/2 elsewhere (Eq. 9)."""
    error = prediction - target
    size = error.abs()
    return torch.where(size < 1, 0.5 * error.square(), size - 0.5).sum() / _scale(prediction)


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """½ Σᵢ ‖V̂ᵢ − Vᵢ‖²: TTT's loss (its Eq. 4 with our ½), a sum over tokens and not a mean."""
    return 0.5 * (prediction - target).square().sum()


LOSSES: dict[str, Loss] = {
    "dot_product": dot_product,
    "mse": mse,
    "rmse": rmse,
    "mae": mae,
    "smooth_l1": smooth_l1,
    "squared_error": squared_error,
}
"""All losses by name."""
