"""The memory-bound kernels against PyTorch's operations: values, gradients, strides."""

import pytest
import torch
import torch.nn.functional as F

from tolerances import assert_close
from vision_ttt.ops import (
    depthwise_conv2d,
    directional_conv1d,
    gated_norm,
    residual_depthwise_conv2d,
    swiglu,
)
from vision_ttt.ops.vit3_ttt import depthwise_correlation

pytestmark = pytest.mark.kernels

LENGTHS = [1, 3, 127, 128, 129, 300]


def both(function, *inputs, tolerance=2e-6):
    """The kernel's values and gradients against PyTorch's in float64."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    inputs = [x.detach().requires_grad_() for x in inputs]
    wanted = function(*exact)
    got = function(*inputs)
    assert got.grad_fn is not None
    assert "vision_ttt" in got.grad_fn.name(), got.grad_fn.name()
    assert_close(got, wanted, tolerance)
    weights = torch.randn(wanted.shape, dtype=torch.float64)
    wanted_gradients = torch.autograd.grad((wanted * weights).sum(), exact)
    gradients = torch.autograd.grad((got * weights.float()).sum(), inputs)
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        assert_close(gradient, wanted_gradient, 5 * tolerance)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("reverse", [0, 16, 48])
@pytest.mark.parametrize("taps", [4, 3])
def test_directional_conv1d(length, reverse, taps):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, length, 48), torch.randn(48, 1, taps), torch.randn(48)
    both(lambda x, w, b: directional_conv1d(x, w, b, reverse), x, weight, bias)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("gated", [True, False])
def test_gated_norm(length, parts, gated):
    torch.manual_seed(0)
    z, gate = torch.randn(2, length, parts * 32), 3 * torch.randn(2, length, 32)
    weight, bias = torch.randn(2, parts, 32)
    if gated:
        both(gated_norm, z, gate, weight, bias)
    else:
        both(lambda z, w, b: gated_norm(z, None, w, b), z, weight, bias)


@pytest.mark.parametrize("grid", [(1, 1), (1, 9), (9, 1), (2, 2), (5, 7), (14, 14)])
@pytest.mark.parametrize("kernel", [3, 5, 1])
def test_depthwise_conv2d(grid, kernel):
    torch.manual_seed(0)
    x, weight = torch.randn(2, grid[0] * grid[1], 48), torch.randn(48, 1, kernel, kernel)
    both(lambda x, w: depthwise_conv2d(x, w, grid), x, weight)


def test_gated_norm_uses_eps():
    z, weight, bias = torch.randn(1, 5, 32) * 0.1, torch.ones(1, 32), torch.zeros(1, 32)
    wanted = F.layer_norm(z, (32,), eps=0.1)
    assert_close(gated_norm(z, None, weight, bias, eps=0.1), wanted, 1e-6)


@pytest.mark.parametrize("shape", [(1, 32), (300, 64), (2, 129, 96), (2, 3, 5, 32)])
def test_swiglu(shape):
    torch.manual_seed(0)
    both(swiglu, 3 * torch.randn(shape))


def test_activations_far_out_and_not_finite():
    x = torch.tensor([-200.0, -88, -20, -6, -1e-3, 0, 1e-3, 6, 20, 88, 200, 1e30, -1e30, 0, 0, 0])
    ones = torch.ones(16)
    assert_close(swiglu(torch.cat([x[:11], x[:5], ones])), F.silu(torch.cat([x[:11], x[:5]])), 1e-6)
    z, weight = torch.zeros(1, 1, 16), torch.zeros(1, 16)
    got = gated_norm(z, x.view(1, 1, 16), weight, torch.ones(1, 16))
    assert ((got[0, 0] - F.gelu(x)).abs() <= 1e-6 + 1e-6 * x.abs()).all()
    infinite = torch.full((16,), float("nan"))
    assert swiglu(torch.cat([infinite, ones])).isnan().all()
    assert gated_norm(z, infinite.view(1, 1, 16), weight, weight + 1).isnan().all()


def gelu(x):
    weight = x.new_zeros(1, 16)
    return gated_norm(x.new_zeros(1, 1, 16), x.view(1, 1, 16), weight, weight + 1).view(16)


@pytest.mark.parametrize(("function", "incoming"), [(swiglu, 1e4), (gelu, 1.0)])
def test_huge_activations(function, incoming):
    """SiLU and GELU are x or 0, and their derivatives 1 or 0, whatever they are multiplied with."""
    x = torch.tensor([90.0, 1e3, 1e10, 1e20, 1e30, 1e36, 1e37, 1e38])
    x = torch.cat([x, -x, *[torch.ones(16)] * (function is swiglu)])
    got, wanted = [], []
    for results, dtype in ((got, torch.float32), (wanted, torch.float64)):
        given = x.to(dtype, copy=True).requires_grad_()
        out = function(given)
        results += out, *torch.autograd.grad(out, given, torch.full_like(out, incoming))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-6, atol=1e-6)


def test_slices_of_a_fused_projection_come_in_as_they_are():
    fused = torch.randn(2, 40, 96)
    before = fused.clone()
    x, gate = fused[..., 16:48], fused[..., 64:]
    weight, bias = torch.randn(32, 1, 4), torch.randn(32)
    conv = directional_conv1d(x, weight, bias, 16)
    assert torch.equal(conv, directional_conv1d(x.contiguous(), weight, bias, 16))
    norm_weight, norm_bias = torch.randn(2, 1, 32)
    merged = gated_norm(x, gate, norm_weight, norm_bias)
    assert torch.equal(
        merged, gated_norm(x.contiguous(), gate.contiguous(), norm_weight, norm_bias)
    )
    assert torch.equal(swiglu(x.transpose(0, 1)), swiglu(x).transpose(0, 1))
    flipped = x.transpose(1, 2).contiguous().transpose(1, 2)  # last axis not contiguous
    assert torch.equal(directional_conv1d(flipped, weight, bias, 16), conv)
    taps = torch.randn(32, 1, 3, 3)
    image = depthwise_conv2d(x, taps, (8, 5))
    assert torch.equal(image, depthwise_conv2d(x.contiguous(), taps, (8, 5)))
    assert torch.equal(image, depthwise_conv2d(flipped, taps, (8, 5)))
    assert torch.equal(fused, before)


MIXED = {  # tokens, and parameters of another dtype
    "directional_conv1d": (
        lambda x, w, b: directional_conv1d(x, w, b, 4),
        ((2, 9, 8), (8, 1, 4), (8,)),
    ),
    "depthwise_conv2d": (
        lambda x, w: depthwise_conv2d(x, w, (3, 3)),
        ((2, 9, 8), (8, 1, 3, 3)),
    ),
    "residual_depthwise_conv2d": (
        lambda x, w: residual_depthwise_conv2d(x, w, (3, 3)),
        ((2, 9, 8), (8, 1, 3, 3)),
    ),
    "gated_norm": (
        lambda z, w, b: gated_norm(z, None, w, b),
        ((2, 9, 16), (2, 8), (2, 8)),
    ),
    "depthwise_correlation": (
        lambda x, y: depthwise_correlation(x, y, (3, 3)),
        ((2, 9, 8), (2, 9, 8)),
    ),
}


@pytest.mark.parametrize(("function", "shapes"), MIXED.values(), ids=MIXED)
def test_tokens_in_half_precision_with_parameters_in_float32(function, shapes):
    """Results have the tokens' dtype on every device, on which models depend."""
    torch.manual_seed(0)
    first, *others = (torch.randn(shape) for shape in shapes)
    given = [x.requires_grad_() for x in (first.bfloat16(), *others)]
    got, wanted = function(*given), function(*(x.detach().double() for x in given))
    assert got.dtype == torch.bfloat16
    assert_close(got, wanted, 3e-2)
    gradients = torch.autograd.grad(got.float().sum(), given)
    assert [x.dtype for x in gradients] == [x.dtype for x in given]
    fake = function(*(x.to("meta") for x in given))
    assert (fake.shape, fake.dtype) == (got.shape, got.dtype)
