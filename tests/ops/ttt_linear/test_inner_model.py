"""The closed-form gradient of the inner loss against autograd."""

import pytest
import torch

from tolerances import assert_close
from vision_ttt.ops._learner_inner_model import InnerNorm, inner_gradient, inner_output


@pytest.mark.parametrize("with_norm", [True, False])
def test_inner_gradient_is_the_gradient_of_the_loss(with_norm):
    z, k, v = torch.randn(3, 2, 3, 5, 8, dtype=torch.float64)
    weight, bias = torch.randn(2, 3, 1, 8, dtype=torch.float64)
    norm = InnerNorm(weight, bias, 1e-6) if with_norm else None
    z.requires_grad_()
    loss = 0.5 * (inner_output(k, z, norm) - v).square().sum()
    (wanted,) = torch.autograd.grad(loss, z)
    assert_close(inner_gradient(z, k, v, norm), wanted, 1e-12)
