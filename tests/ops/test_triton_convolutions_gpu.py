"""The Triton kernels of both convolutions on a GPU: values, PyTorch's machinery, size, memory."""

import pytest
import torch

from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt.ops import depthwise_conv2d, directional_conv1d

pytestmark = pytest.mark.gpu

DTYPES = [  # x, parameters
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
]


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_()


def outcome(function, inputs, grad):
    """The value and all gradients."""
    y = function(*inputs)
    return y, *torch.autograd.grad(y, inputs, grad)


def check(function, *inputs):
    """Against PyTorch's operations in float64, which the kernels do not take."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    y = function(*inputs)
    assert "vision_ttt" in y.grad_fn.name(), y.grad_fn.name()
    assert y.dtype == inputs[0].dtype
    grad = torch.randn(*y.shape[:-1], y.shape[-1] + 8, device="cuda").to(y.dtype)[..., 8:]
    got, wanted = outcome(function, inputs, grad), outcome(function, exact, grad.double())
    assert_close(got[0], wanted[0], FORWARD[y.dtype])
    for x, gradient, wanted_gradient in zip(inputs, got[1:], wanted[1:], strict=True):
        assert gradient.dtype == x.dtype
        assert_close(gradient, wanted_gradient, GRADIENT[x.dtype])


@pytest.mark.parametrize(("dtype", "parameters"), DTYPES)
@pytest.mark.parametrize("length", [1, 3, 64, 197])
@pytest.mark.parametrize(("channels", "reverse"), [(1, 0), (5, 5), (70, 30), (192, 96), (384, 128)])
@pytest.mark.parametrize("taps", [3, 4])
def test_directional_conv1d(dtype, parameters, length, channels, reverse, taps):
    weight = random(channels, 1, taps, dtype=parameters)
    bias = random(channels, dtype=parameters)
    x = random(3, length, channels, dtype=dtype)
    check(lambda *inputs: directional_conv1d(*inputs, reverse), x, weight, bias)


@pytest.mark.parametrize(("dtype", "parameters"), DTYPES)
@pytest.mark.parametrize("grid", [(1, 1), (1, 9), (9, 1), (14, 14), (8, 24), (31, 5)])
@pytest.mark.parametrize("channels", [1, 70, 192])
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_depthwise_conv2d(dtype, parameters, grid, channels, kernel):
    weight = random(channels, 1, kernel, kernel, dtype=parameters)
    x = random(3, grid[0] * grid[1], channels, dtype=dtype)
    check(lambda *inputs: depthwise_conv2d(*inputs, grid), x, weight)


@pytest.mark.parametrize("offset", [0, 1, 8, 192])
def test_views_of_one_projection_without_a_copy(offset):
    """Wherever they begin: the compiler must have been told what is aligned."""
    batch, length, channels = 16, 3136, 192
    fused = random(batch, length, 2 * channels, dtype=torch.bfloat16).detach()
    x = fused[..., offset : offset + channels]
    weight, bias = random(channels, 1, 4).detach(), random(channels).detach()
    taps = random(channels, 1, 3, 3).detach()
    for function in (
        lambda x: directional_conv1d(x, weight, bias, 96),
        lambda x: depthwise_conv2d(x, taps, (56, 56)),
    ):
        wanted = function(x.contiguous())
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = function(x)
        peak = torch.cuda.max_memory_allocated() - before
        assert torch.equal(y, wanted)
        assert peak <= 1.1 * y.numel() * y.element_size()


def both(x, weight, bias, taps, grid=(14, 14)):
    return depthwise_conv2d(directional_conv1d(x, weight, bias, 96), taps, grid)


def problem(*shape):
    """bfloat16 tokens and float32 parameters, as under autocast."""
    channels = shape[-1]
    parameters = random(channels, 1, 4), random(channels), random(channels, 1, 3, 3)
    return random(*shape, dtype=torch.bfloat16), *parameters


def test_compiles_as_one_graph_and_for_any_grid():
    compiled = torch.compile(both, fullgraph=True, dynamic=True)
    for grid in ((14, 14), (9, 20), (30, 4)):
        inputs = problem(2, grid[0] * grid[1], 192)
        grad = torch.randn_like(inputs[0])
        wanted = outcome(lambda *inputs: both(*inputs, grid), inputs, grad)  # noqa: B023
        got = outcome(lambda *inputs: compiled(*inputs, grid), inputs, grad)  # noqa: B023
        assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


def test_cuda_graph_of_a_training_step():
    """Captured once, replayed on other numbers: the same as without a graph."""
    inputs = problem(2, 196, 192)
    grad = torch.randn_like(inputs[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        outcome(both, inputs, grad)  # compiles the kernels, which a capture cannot
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outcome(both, inputs, grad)
    with torch.no_grad():
        for x in inputs:
            x.copy_(torch.randn_like(x))
    graph.replay()
    replayed = [x.clone() for x in captured]
    wanted = outcome(both, inputs, grad)
    assert all(torch.equal(x, y) for x, y in zip(replayed, wanted, strict=True))


def test_gradients_are_equal_to_the_bit_twice():
    inputs = problem(64, 196, 384)
    grad = torch.randn_like(inputs[0])
    first, second = (outcome(both, inputs, grad) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_offsets_beyond_32_bits():
    """B·T·C > 2³¹: the last image equals the same computed alone."""
    batch, grid, channels = 44, (256, 256), 768
    length = grid[0] * grid[1]
    assert batch * length * channels > 2**31
    x, weight, bias, taps = problem(batch, length, channels)
    for function in (
        lambda x: directional_conv1d(x, weight, bias, 384),
        lambda x: depthwise_conv2d(x, taps, grid),
    ):
        last = x[-1:].detach().requires_grad_()
        wanted = outcome(function, [last], last.detach())
        got = outcome(function, [x], x.detach())
        assert all(torch.equal(a[-1:], b) for a, b in zip(got, wanted, strict=True))
        del got
