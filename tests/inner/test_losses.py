"""The losses of ViT³'s supplement: values, and mixed second derivatives as given there."""

import math

import pytest
import torch

from tolerances import assert_close
from vision_ttt.inner import LOSSES, dot_product, mae, mse, rmse, smooth_l1, squared_error

N, D = 5, 3
SCALE = N * math.sqrt(D)


@pytest.fixture
def batch():
    """Predictions and targets with errors on both sides of smooth L1's bend."""
    generator = torch.Generator().manual_seed(0)
    prediction, target = 1.5 * torch.randn(2, N, D, dtype=torch.float64, generator=generator)
    size = (prediction - target).abs()
    assert (size < 1).any()
    assert (size > 1).any()
    return prediction, target


def mixed_second_derivative(loss, prediction, target):
    """∂²L/∂V_ij ∂V̂_ij [n, d], by automatic differentiation alone."""
    gradient = torch.func.grad(loss, argnums=0)
    jacobian = torch.func.jacrev(gradient, argnums=1)(prediction, target)  # [n, d, n, d]
    return jacobian.reshape(N * D, N * D).diagonal().reshape(N, D)


def test_values_written_out(batch):
    """Eq. 1, 3, 5, 7 and 9 entry by entry."""
    prediction, target = batch
    pairs = list(zip(prediction.flatten().tolist(), target.flatten().tolist(), strict=True))
    squares = sum((a - b) ** 2 for a, b in pairs)
    bends = sum(0.5 * (a - b) ** 2 if abs(a - b) < 1 else abs(a - b) - 0.5 for a, b in pairs)
    wanted = {
        dot_product: -sum(a * b for a, b in pairs) / SCALE,
        mse: squares / (2 * SCALE),
        rmse: math.sqrt(squares / SCALE),
        mae: sum(abs(a - b) for a, b in pairs) / SCALE,
        smooth_l1: bends / SCALE,
        squared_error: squares / 2,
    }
    assert set(wanted) == set(LOSSES.values())
    for loss, value in wanted.items():
        assert loss(prediction, target).item() == pytest.approx(value, rel=1e-12), loss.__name__


def test_equations_2_and_4(batch):
    for loss in (dot_product, mse):
        wanted = torch.full((N, D), -1 / SCALE, dtype=torch.float64)
        assert_close(mixed_second_derivative(loss, *batch), wanted, 1e-12, loss.__name__)


def test_equation_6(batch):
    prediction, target = batch
    error = prediction - target
    s = error.square().sum() / SCALE
    wanted = -1 / (SCALE * s.sqrt()) + error.square() / (N**2 * D * s**1.5)
    assert_close(mixed_second_derivative(rmse, *batch), wanted, 1e-12)


def test_equation_8(batch):
    assert (mixed_second_derivative(mae, *batch) == 0).all()


def test_equation_10(batch):
    prediction, target = batch
    wanted = -((prediction - target).abs() < 1).double() / SCALE
    assert_close(mixed_second_derivative(smooth_l1, *batch), wanted, 1e-12)
