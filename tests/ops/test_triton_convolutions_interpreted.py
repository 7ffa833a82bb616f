"""The Triton kernels of both convolutions, interpreted, against PyTorch in float64."""

import ctypes
import mmap

import pytest
import torch

from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt.ops import depthwise_conv2d, directional_conv1d, use_backend

pytest.importorskip("triton")
pytestmark = pytest.mark.interpreted

CONV1D = [  # B, T, C, reverse channels, K: ragged and whole tiles of 64 × 64, one to three of them
    (1, 1, 5, 0, 4),
    (2, 3, 70, 70, 3),
    (2, 65, 70, 30, 4),
    (1, 130, 20, 4, 3),
    (2, 64, 128, 64, 4),
    (1, 9, 131, 66, 1),
    (2, 7, 1, 1, 2),
]
CONV2D = [  # B, (h, w), C, K: ragged and whole patches of 8 × 8, one to six of them
    (1, (1, 1), 5, 3),
    (2, (1, 9), 64, 3),
    (1, (9, 2), 70, 5),
    (2, (9, 17), 20, 3),
    (2, (8, 8), 128, 3),
    (1, (3, 4), 65, 1),
    (1, (2, 3), 1, 7),
]
DTYPES = [  # x, parameters; the tests below are in float32 for both
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    pytest.param(torch.float32, torch.float16, marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def _triton():
    with use_backend("triton"):
        yield


def surrounded(x):
    """A copy of x that lies amid NaN: what is read beyond an edge shows."""
    room = torch.full([size + 8 for size in x.shape[:2]] + [*x.shape[2:]], float("nan"))
    room = room.to(x.dtype)
    if x.ndim == 3:  # tokens, whose channels are a part of a wider projection's
        room = torch.cat([room, room, room], dim=-1)
        inner = room[4:-4, 4:-4, x.shape[-1] : 2 * x.shape[-1]]
    else:
        inner = room[4:-4, 4:-4]
    return inner.copy_(x)


def at_the_end_of_memory(x):
    """A copy of x behind which reading or writing anything ends the process."""
    size = x.numel() * x.element_size()
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, whole + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    forbidden = ctypes.c_void_p(start + whole), ctypes.c_size_t(mmap.PAGESIZE), 0
    assert libc.mprotect(*forbidden) == 0, ctypes.get_errno()
    room = torch.frombuffer(pages, dtype=x.dtype, count=x.numel(), offset=whole - size)
    return room.view(x.shape).copy_(x)


def parameter(*shape, dtype=torch.float32):
    """Numbers amid NaN along the first axis: a contiguous view."""
    room = torch.full((shape[0] + 8, *shape[1:]), float("nan"), dtype=dtype)
    return room[4:-4].copy_(torch.randn(shape))


def check(function, *inputs, grad=None):
    """Values and all gradients against PyTorch's operations in float64."""
    before = [x.detach().clone() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    inputs = [x.detach().requires_grad_() for x in inputs]
    with use_backend("reference"):
        wanted = function(*exact)
    got = function(*inputs)
    assert "vision_ttt" in got.grad_fn.name(), got.grad_fn.name()
    assert got.dtype == inputs[0].dtype
    assert got.is_contiguous()
    assert_close(got, wanted, FORWARD[got.dtype])
    if grad is None:
        grad = surrounded(torch.randn(got.shape).to(got.dtype))
    wanted_gradients = torch.autograd.grad(wanted, exact, grad.double())
    gradients = torch.autograd.grad(got, inputs, grad)
    for x, gradient, wanted_gradient in zip(inputs, gradients, wanted_gradients, strict=True):
        assert gradient.dtype == x.dtype
        assert_close(gradient, wanted_gradient, GRADIENT[x.dtype])
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def conv1d_problem(batch, length, channels, taps, dtype=torch.float32, parameters=torch.float32):
    torch.manual_seed(0)
    x = surrounded(torch.randn(batch, length, channels).to(dtype))
    weight = parameter(channels, 1, taps, dtype=parameters)
    return x, weight, parameter(channels, dtype=parameters)


def conv2d_problem(batch, grid, channels, kernel, dtype=torch.float32, parameters=torch.float32):
    torch.manual_seed(0)
    x = surrounded(torch.randn(batch, grid[0] * grid[1], channels).to(dtype))
    return x, parameter(channels, 1, kernel, kernel, dtype=parameters)


@pytest.fixture
def _poisoned(monkeypatch):
    """Buffers that start as NaN: what a kernel forgets to write shows."""
    new_empty = torch.Tensor.new_empty

    def poisoned(self, *shape, **options):
        return new_empty(self, *shape, **options).fill_(float("nan"))

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


@pytest.mark.parametrize(("batch", "length", "channels", "reverse", "taps"), CONV1D)
@pytest.mark.usefixtures("_poisoned")
def test_directional_conv1d(batch, length, channels, reverse, taps):
    problem = conv1d_problem(batch, length, channels, taps)
    check(lambda *inputs: directional_conv1d(*inputs, reverse), *problem)


@pytest.mark.parametrize(("batch", "grid", "channels", "kernel"), CONV2D)
@pytest.mark.usefixtures("_poisoned")
def test_depthwise_conv2d(batch, grid, channels, kernel):
    problem = conv2d_problem(batch, grid, channels, kernel)
    check(lambda *inputs: depthwise_conv2d(*inputs, grid), *problem)


@pytest.mark.parametrize(("dtype", "parameters"), DTYPES)
def test_dtypes(dtype, parameters):
    problem = conv1d_problem(1, 65, 24, 4, dtype, parameters)
    check(lambda *inputs: directional_conv1d(*inputs, 8), *problem)
    problem = conv2d_problem(1, (3, 9), 24, 3, dtype, parameters)
    check(lambda *inputs: depthwise_conv2d(*inputs, (3, 9)), *problem)


def test_the_bias_has_a_dtype_of_its_own():
    x, weight, bias = conv1d_problem(1, 9, 24, 4, torch.bfloat16, torch.bfloat16)
    check(lambda *inputs: directional_conv1d(*inputs, 8), x, weight, bias.float())


def test_sums_are_not_rounded_on_the_way():
    """1 and -1 leave what half precision loses beside either of them."""
    x = torch.tensor([1.0, 2.0**-12, -1.0]).half()
    weight, bias = torch.ones(2, 1, 3).half(), torch.zeros(2).half()
    y = directional_conv1d(x.view(1, 3, 1).repeat(1, 5, 2), weight, bias, 1)
    assert (y[0, 2:-2] == 2.0**-12).all()
    y = depthwise_conv2d(x.view(1, 3, 1), torch.ones(1, 1, 3, 3).half(), (1, 3))
    assert y[0, 1, 0] == 2.0**-12


def test_other_strides():
    x, weight, bias = conv1d_problem(2, 12, 24, 3)
    one_image = x[:1].expand(3, -1, -1)
    across = x.transpose(1, 2).contiguous().transpose(1, 2)  # last axis not contiguous
    taps_first = parameter(3, 24).t().unsqueeze(1)
    taps = parameter(3, 3, 24).permute(2, 0, 1).unsqueeze(1)
    for tokens in (one_image, across, x.contiguous()):
        check(lambda *inputs: directional_conv1d(*inputs, 8), tokens, taps_first, bias)
        check(lambda *inputs: depthwise_conv2d(*inputs, (3, 4)), tokens, taps)
    everywhere_one = torch.ones(1).expand(2, 12, 24)
    check(lambda *inputs: directional_conv1d(*inputs, 8), x, weight, bias, grad=everywhere_one)
    check(lambda *inputs: depthwise_conv2d(*inputs, (3, 4)), x, taps, grad=everywhere_one)


@pytest.mark.parametrize("strides", [(2**30, 8, 1), (8, 2**30, 1)])
def test_offsets_beyond_32_bits(strides):
    """Of the strides only: the memory between the tokens is never touched."""
    room = torch.empty(2**31 + 64, dtype=torch.float16)
    x = room.as_strided((3, 3, 8), strides).copy_(torch.randn(3, 3, 8))
    weight, bias = torch.randn(8, 1, 4).half(), torch.randn(8).half()
    close = x.clone(memory_format=torch.contiguous_format)
    for function in (
        lambda x, w: directional_conv1d(x, w, bias, 4),
        lambda x, w: depthwise_conv2d(x, w[..., :1].unsqueeze(-1), (1, 3)),
    ):
        outcomes = []
        for tokens in (x, close):
            inputs = [tokens.detach().requires_grad_(), weight.detach().requires_grad_()]
            y = function(*inputs)
            outcomes.append((y, *torch.autograd.grad(y, inputs, tokens.detach())))
        assert all(torch.equal(far, near) for far, near in zip(*outcomes, strict=True))


def test_nothing_beyond_a_tensor_is_touched(monkeypatch):
    new_empty = torch.Tensor.new_empty

    def at_the_end(self, *shape, **options):
        x = new_empty(self, *shape, **options).fill_(float("nan"))
        return at_the_end_of_memory(x) if x.numel() else x  # the interpreter makes empty ones

    monkeypatch.setattr(torch.Tensor, "new_empty", at_the_end)
    x, grad = (at_the_end_of_memory(torch.randn(2, 12, 70)) for _ in range(2))
    weight, bias, taps = (
        at_the_end_of_memory(torch.randn(shape)) for shape in ((70, 1, 4), (70,), (70, 1, 3, 3))
    )
    check(lambda *inputs: directional_conv1d(*inputs, 0), x, weight, bias, grad=grad)
    check(lambda *inputs: directional_conv1d(*inputs, 35), x, weight, bias, grad=grad)
    check(lambda *inputs: depthwise_conv2d(*inputs, (3, 4)), x, taps, grad=grad)


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype).requires_grad_()
