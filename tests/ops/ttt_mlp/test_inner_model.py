"""The closed forms of the inner model against autograd."""

import pytest
import torch
import torch.nn.functional as F

from tolerances import assert_close
from vision_ttt.ops._learner_inner_model import (
    InnerNorm,
    gelu,
    gelu_derivative,
    gelu_second_derivative,
    inner_output,
    inner_step,
    layers_of,
)


def test_derivatives_of_gelu():
    z = torch.linspace(-6, 6, 101, dtype=torch.float64, requires_grad=True)
    value = gelu(z)
    (first,) = torch.autograd.grad(value.sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z)
    assert_close(value, F.gelu(z, approximate="tanh"), 1e-15)
    assert_close(gelu_derivative(z), first, 1e-13)
    assert_close(gelu_second_derivative(z), second, 1e-13)


@pytest.mark.parametrize("with_norm", [True, False])
def test_inner_step_is_the_gradient_of_the_loss(with_norm):
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 3, 5, 8, dtype=torch.float64)
    shapes = (3, 8, 32), (3, 32), (3, 32, 8), (3, 8)
    state = [torch.randn(2, *shape, dtype=torch.float64) for shape in shapes]
    weight, bias = torch.randn(2, 3, 1, 8, dtype=torch.float64)
    norm = InnerNorm(weight, bias, 1e-6) if with_norm else None
    step = inner_step(k, v, layers_of(state), norm)
    z1, x2, z2 = (x.detach().requires_grad_() for x in (step.z[0], step.x[1], step.z[1]))
    for leaf, wanted in ((z1, step.g[0]), (x2, step.e[0]), (z2, step.g[1])):
        hidden = gelu(z1) if leaf is z1 else x2
        z = z2 if leaf is z2 else hidden @ state[2] + state[3].unsqueeze(2)
        loss = 0.5 * (inner_output(k, z, norm) - v).square().sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert_close(gradient, wanted, 1e-12)
