"""The memory-bound kernels against PyTorch's operations: values, gradients, strides, fallbacks."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from tolerances import assert_close
from vision_ttt.ops import depthwise_conv2d, directional_conv1d, gated_norm, swiglu, use_backend
from vision_ttt.ops.depthwise_conv2d.cpu import depthwise_conv2d_op
from vision_ttt.ops.directional_conv1d.cpu import directional_conv1d_op
from vision_ttt.ops.gated_norm.cpu import gated_norm_op
from vision_ttt.ops.swiglu import swiglu_
from vision_ttt.ops.swiglu.cpu import swiglu_in_place_op, swiglu_op

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


@pytest.mark.parametrize("width", [64, 24])  # whole vectors, and PyTorch's operations
def test_swiglu_in_place(width):
    x = torch.randn(2, 130, width)
    wanted, rest = swiglu(x), x[..., width // 2 :].clone()
    got = swiglu_(x)
    assert_close(got, wanted, 1e-6)
    assert got.data_ptr() == x.data_ptr()
    assert torch.equal(x[..., width // 2 :], rest)


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


def random(*shape):
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (directional_conv1d_op, (random(2, 9, 32), random(32, 1, 4), random(32), 16)),
        (gated_norm_op, (random(2, 9, 64), random(2, 9, 32), random(2, 32), random(2, 32), 1e-6)),
        (gated_norm_op, (random(2, 9, 32), None, random(1, 32), random(1, 32), 1e-6)),
        (depthwise_conv2d_op, (random(2, 6, 32), random(32, 1, 3, 3), 2, 3)),
        (swiglu_op, (random(2, 9, 64),)),
        (swiglu_in_place_op, (torch.randn(2, 9, 64),)),
    ],
    ids=["conv1d", "gated norm", "norm", "conv2d", "swiglu", "swiglu in place"],
)
def test_opcheck(op, arguments):
    torch.library.opcheck(op, arguments)


def test_what_the_kernels_do_not_take_goes_through_pytorch():
    x, weight, bias = torch.randn(2, 9, 32), torch.randn(32, 1, 4), torch.randn(32)

    def runs_a_kernel(*inputs, reverse=16):
        leaf = inputs[0].detach().requires_grad_()
        y = directional_conv1d(leaf, *inputs[1:], reverse)
        return "vision_ttt" in y.grad_fn.name()

    assert runs_a_kernel(x, weight, bias)
    assert not runs_a_kernel(x, weight, bias, reverse=8)
    assert not runs_a_kernel(x.double(), weight.double(), bias.double())
    assert not runs_a_kernel(x[..., :24], weight[:24], bias[:24], reverse=0)
    assert not runs_a_kernel(x[:0], weight, bias)
    with use_backend("dual"):
        assert not runs_a_kernel(x, weight, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert directional_conv1d(x, weight, bias, 16).dtype == torch.bfloat16
    tangent = torch.randn_like(x)
    _, derivative = torch.func.jvp(
        lambda x: directional_conv1d(x, weight, bias, 16), (x,), (tangent,)
    )
    assert_close(derivative, directional_conv1d(tangent, weight, 0 * bias, 16), 1e-5)


def test_the_same_bits_whatever_the_threads():
    z, gate = torch.randn(2, 500, 64), torch.randn(2, 500, 32)
    weight = torch.randn(2, 32, requires_grad=True)
    before = torch.get_num_threads()
    gradients = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out = gated_norm(z, gate, weight, weight)
            gradients.append(torch.autograd.grad(out.square().sum(), weight)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


@pytest.mark.parametrize("isa", ["avx2", "baseline"])
def test_lesser_instruction_sets_compute_the_same(isa):
    code = """
import torch
import test_fused as t
for length in t.LENGTHS:
    t.test_directional_conv1d(length, 16, 4)
    t.test_gated_norm(length, 2, True)
t.test_swiglu((300, 64))
t.test_swiglu_in_place(64)
t.test_depthwise_conv2d((5, 7), 3)
t.test_depthwise_conv2d((2, 2), 5)
t.test_activations_far_out_and_not_finite()
"""
    folder = os.path.dirname(__file__)
    path = os.pathsep.join([folder, os.path.dirname(folder), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"VISION_TTT_CPU_ISA": isa, "PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
