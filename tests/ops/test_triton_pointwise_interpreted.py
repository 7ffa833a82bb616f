"""The Triton kernels of gated_norm and swiglu, interpreted, against PyTorch in float64."""

import pytest
import torch

from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt.ops import gated_norm, swiglu, use_backend
from vision_ttt.ops._table import TABLE
from vision_ttt.ops.gated_norm import triton_backend

pytest.importorskip("triton")
pytestmark = pytest.mark.interpreted

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def triton():
    with use_backend("triton"):
        yield


def random(*shape, dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def ungated(z, weight, bias):
    return gated_norm(z, None, weight, bias)


def norm_inputs(batch, length, parts, dim, dtype=torch.float32, parameters=None, scale=1.0):
    parameters = parameters or dtype
    return (
        random(batch, length, parts * dim, dtype=dtype, scale=scale),
        random(batch, length, dim, dtype=dtype, scale=2.0, seed=1),
        1 + random(parts, dim, dtype=parameters, scale=0.3, seed=2),
        random(parts, dim, dtype=parameters, seed=3),
    )


def solve(function, *inputs, grad):
    """The output and the gradients of all inputs, given that of the output."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))


def solve_exactly(function, *inputs, grad):
    """The same by PyTorch in float64."""
    with use_backend("reference"):
        return solve(function, *(x.double() for x in inputs), grad=grad.double())


def check(function, *inputs, grad=None):
    """The kernels' results against PyTorch's in float64; every result in its tensor's dtype."""
    before = [x.clone() for x in inputs]
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    assert "vision_ttt" in out.grad_fn.name(), out.grad_fn.name()
    if grad is None:
        grad = random(*out.shape, dtype=out.dtype, seed=4)
    got = out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))
    wanted = solve_exactly(function, *inputs, grad=grad)
    assert got[0].dtype == inputs[0].dtype
    assert_close(got[0], wanted[0], FORWARD[got[0].dtype], "output")
    for index, x in enumerate(inputs):
        gradient = got[1 + index]
        assert gradient.dtype == x.dtype
        assert_close(gradient, wanted[1 + index], GRADIENT[x.dtype], f"gradient {index}")
        assert torch.equal(x, before[index])
    return got


# One token; ragged ends of tiles and shares; widths that are no power of two, nor a multiple of 8.
NORMS = [(1, 1, 24), (2, 9, 24), (1, 17, 192), (2, 5, 33), (1, 3, 600)]
NORMS.append(pytest.param((3, 19, 48), marks=pytest.mark.slow))


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("shape", NORMS, ids=str)
def test_gated_norm(shape, parts):
    batch, length, dim = shape
    z, gate, weight, bias = norm_inputs(batch, length, parts, dim)
    check(gated_norm, z, gate, weight, bias)
    check(ungated, z, weight, bias)


@pytest.mark.parametrize("parameters", [None, torch.float32], ids=["alike", "float32 parameters"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_norm_in_half_precision(dtype, parameters):
    z, gate, weight, bias = norm_inputs(2, 9, 2, 48, dtype, parameters)
    check(gated_norm, z, gate, weight, bias)
    check(ungated, z, weight, bias)


def test_gated_norm_of_tensors_of_three_dtypes():
    z, _, weight, _ = norm_inputs(1, 9, 2, 24, torch.bfloat16, torch.float32)
    gate, bias = random(1, 9, 24, dtype=torch.float16), random(2, 24, dtype=torch.bfloat16)
    check(gated_norm, z, gate, weight, bias)


def test_gated_norm_of_a_width_of_one():
    """z - mean(z) is zero: the biases are left."""
    check(gated_norm, *norm_inputs(2, 3, 2, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e4])
def test_gated_norm_of_large_and_tiny_numbers(dtype, scale):
    """Squares beyond float16's range either way; below √eps the norm passes z on, scaled."""
    z, gate, weight, bias = norm_inputs(1, 9, 2, 48, dtype, scale=scale)
    assert not z.eq(0).all()
    check(gated_norm, z, gate, weight, 0 * bias)


def test_gated_norm_uses_eps():
    z, gate, weight, bias = norm_inputs(1, 5, 2, 24, scale=0.1)
    check(lambda *tensors: gated_norm(*tensors, eps=0.1), z, gate, weight, bias)


def test_with_eps_0_the_padding_leaves_no_trace():
    """The norm of what is not there divides by 0: NaN, were it used."""
    z, gate, weight, bias = norm_inputs(1, 5, 3, 24)
    check(lambda *tensors: gated_norm(*tensors, eps=0.0), z, gate, weight, bias)


def test_a_mean_far_from_zero():
    """The variance is that of centred numbers; E[z²] - E[z]² would leave none of its digits."""
    z, gate, weight, bias = norm_inputs(1, 5, 2, 48)
    exact = solve_exactly(gated_norm, z + 1e3, gate, weight, bias, grad=gate)
    got = solve(gated_norm, z + 1e3, gate, weight, bias, grad=gate)
    for result, wanted in zip(got, exact, strict=True):
        assert_close(result, wanted, 1e-3)


@pytest.mark.parametrize("dim", [24, 192])
def test_programs_that_take_many_tiles(dim, monkeypatch):
    monkeypatch.setattr(triton_backend, "FORWARD_PROGRAMS", 3)
    monkeypatch.setattr(triton_backend, "BACKWARD_PROGRAMS", 2)
    check(gated_norm, *norm_inputs(2, 1000 // dim, 2, dim))


def within(x, before, after, rows=2):
    """x [B, T, C] as a view of a wider and longer tensor, NaN everywhere else."""
    batch, length, width = x.shape
    wide = torch.full((batch, length + rows, before + width + after), float("nan"), dtype=x.dtype)
    view = wide[:, rows // 2 : rows // 2 + length, before : before + width]
    view.copy_(x)
    assert not view.is_contiguous()
    return view


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norm_of_strided_views(dtype, monkeypatch):
    z, gate, weight, bias = norm_inputs(3, 11, 2, 24, dtype, torch.float32)
    grad = random(3, 11, 24, dtype=dtype, seed=4)
    wanted = solve(gated_norm, z, gate, weight, bias, grad=grad)
    views = within(z, 8, 3), within(gate, 1, 0, rows=4), within(grad, 0, 5)
    monkeypatch.setattr(torch.Tensor, "contiguous", refuse_large(24 * 4))  # but for the parameters
    got = solve(gated_norm, views[0], views[1], weight, bias, grad=views[2])
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    got = solve(ungated, views[0], weight, bias, grad=views[2])
    wanted = solve(ungated, z, weight, bias, grad=grad)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def refuse_large(size, contiguous=torch.Tensor.contiguous):
    def checked(x, *arguments, **options):
        assert x.is_contiguous() or x.numel() <= size, "a copy"
        return contiguous(x, *arguments, **options)

    return checked


def test_gated_norm_of_other_strides():
    """Last axes that are not contiguous, a sum's gradient, which has no strides, one image's."""
    z, gate, weight, bias = norm_inputs(2, 5, 2, 24)
    grad = torch.ones(1).expand(2, 5, 24)
    wanted = solve(gated_norm, z, gate, weight, bias, grad=grad.contiguous())
    turned = [x.mT.contiguous().mT for x in (z, gate, weight, bias)]
    assert not any(x.is_contiguous() for x in turned)
    got = solve(gated_norm, *turned, grad=grad)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    one = [z[:1].expand(2, -1, -1), gate[:1].expand(2, -1, -1), weight, bias]
    assert torch.equal(gated_norm(*one), gated_norm(one[0].clone(), one[1].clone(), *one[2:]))


@pytest.mark.parametrize("shape", [(1, 24), (3, 2), (70, 96), (2, 19, 384), (2, 3, 5, 66)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(shape, dtype):
    x = random(*shape, dtype=dtype, scale=2.0)
    check(swiglu, x)


def test_swiglu_of_more_columns_than_a_program_takes():
    check(swiglu, random(11, 2 * 600, scale=2.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_of_strided_views(dtype, monkeypatch):
    x, grad = random(3, 11, 48, dtype=dtype), random(3, 11, 24, dtype=dtype, seed=1)
    wanted = solve(swiglu, x, grad=grad)
    views = within(x, 8, 3, rows=0), within(grad, 0, 5, rows=0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "contiguous", refuse_large(0))
        got = solve(swiglu, views[0], grad=views[1])
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    turned, parted = x.mT.contiguous().mT, within(x, 8, 3)
    for other in (turned, parted):
        got = solve(swiglu, other, grad=torch.ones(1, dtype=dtype).expand(3, 11, 24))
        wanted = solve(swiglu, x, grad=torch.ones(3, 11, 24))
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_activations_near_and_far_out(dtype):
    far = [-200.0, -88, -20, -6, -1, -1e-3, 0, 1e-3, 1, 6, 20, 88, 200, 6e4, -6e4]
    far += [1e30, -1e30] if dtype == torch.float32 else []
    x = torch.tensor(far, dtype=dtype).view(1, 1, -1)
    ones, zeros = torch.ones_like(x), torch.zeros_like(x)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    for function, inputs in (
        (swiglu, [torch.cat([x, ones], dim=-1)]),
        (gated_norm, [zeros, x, zeros[0], ones[0]]),
    ):
        got = solve(function, *inputs, grad=ones)
        wanted = solve_exactly(function, *inputs, grad=ones)
        for result, exact in zip(got, wanted, strict=True):
            assert ((result - exact).abs() <= tolerance * (1 + exact.abs())).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_as_with_pytorch(value):
    x, ones = torch.full((1, 1, 24), value), torch.ones(1, 1, 24)
    for function, inputs in (
        (swiglu, [torch.cat([x, ones], dim=-1)]),
        (swiglu, [torch.cat([ones, x], dim=-1)]),
        (gated_norm, [ones, x, 0 * ones[0], ones[0]]),
        (ungated, [x, ones[0], ones[0]]),
    ):
        got = function(*inputs)
        with use_backend("reference"):
            wanted = function(*(y.double() for y in inputs))
        assert torch.allclose(got, wanted.float(), equal_nan=True)


def test_nan_stays_in_its_own_token():
    z, gate, weight, bias = norm_inputs(1, 9, 2, 24)
    wanted = gated_norm(z, gate, weight, bias)
    z[0, 4, 30] = float("nan")
    got = gated_norm(z, gate, weight, bias)
    assert got[0, 4].isnan().all()
    others = [t for t in range(9) if t != 4]
    assert torch.equal(got[0, others], wanted[0, others])


class Guard:
    """New tensors start as NaN and lie within a margin that nothing may be written to."""

    MARGIN = 20_000

    def __init__(self, monkeypatch):
        self.buffers = []
        ordinary = torch.Tensor.new_empty

        def new_empty(x, *shape, **options):
            if "device" in options:  # the interpreter's own
                return ordinary(x, *shape, **options)
            return self.new_empty(*shape, **{"dtype": x.dtype, **options})

        monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)

    def new_empty(self, *shape, dtype):
        shape = torch.Size(shape[0] if isinstance(shape[0], tuple) else shape)
        buffer = torch.full((shape.numel() + 2 * self.MARGIN,), 7.0, dtype=dtype)
        self.buffers.append(buffer)
        return buffer[self.MARGIN : -self.MARGIN].fill_(float("nan")).view(shape)

    def check(self):
        for buffer in self.buffers:
            assert buffer[: self.MARGIN].eq(7).all()
            assert buffer[-self.MARGIN :].eq(7).all()
            assert not buffer.isnan().any()


@pytest.mark.parametrize("dim", [24, 33])
@pytest.mark.parametrize("parts", [1, 3])
def test_all_of_the_results_is_written_and_nothing_else(parts, dim, monkeypatch):
    inputs = norm_inputs(2, 9, parts, dim)
    grad = random(2, 9, dim, seed=4)
    x, half = random(2, 9, 2 * dim), random(2, 9, dim)
    wanted = [solve(gated_norm, *inputs, grad=grad), solve(swiglu, x, grad=half)]
    guard = Guard(monkeypatch)
    norm, glu = TABLE["gated_norm"], TABLE["swiglu"]
    backend, given = norm.backends["triton"], norm.inputs(*inputs, 1e-6)
    got = [backend.forward(given), *backend.backward(given, grad)]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted[0], strict=True))
    backend, given = glu.backends["triton"], glu.inputs(x)
    got = backend.forward(given), backend.backward(given, half)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted[1], strict=True))
    assert len(guard.buffers) == 7
    guard.check()


def test_offsets_beyond_32_bits(tmp_path):
    """Strides below 2³¹ whose multiples are not; a sparse file takes no memory."""
    stride = 2**30
    path = str(tmp_path / "sparse")
    memory = torch.from_file(path, shared=True, size=3 * stride + 96, dtype=torch.bfloat16)
    z, gate, weight, bias = norm_inputs(1, 4, 2, 24, torch.bfloat16, torch.float32)
    wanted = solve(gated_norm, z, gate, weight, bias, grad=gate)
    for images, strides in ((1, (0, stride, 1)), (4, (stride, 0, 1))):
        far = [
            memory.as_strided(x.shape, strides, start).copy_(x)
            for x, start in ((z.view(images, -1, 48), 0), (gate.view(images, -1, 24), 48))
        ]
        got = solve(gated_norm, *far, weight, bias, grad=far[1])
        assert all(torch.equal(a.flatten(), b.flatten()) for a, b in zip(got, wanted, strict=True))
    rows = memory.as_strided((4, 48), (stride, 1))
    rows.copy_(z.view(4, 48))
    far = memory.as_strided((4, 24), (stride, 1), 48)
    far.copy_(gate.view(4, 24))
    wanted = solve(swiglu, z.view(4, 48), grad=gate.view(4, 24))
    got = solve(swiglu, rows, grad=far)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_the_widest_tile():
    dim = triton_backend.LARGEST_TILE // 2
    check(gated_norm, *norm_inputs(1, 1, 2, dim))


def test_sizes_that_the_kernels_refuse(monkeypatch):
    inputs = TABLE["gated_norm"].inputs(*norm_inputs(1, 5, 2, 24), 1e-6)
    for name, fits, reason in (
        ("LARGEST_TILE", 2 * 32, "2 · 24 channels, each padded to a power of two, are over 63"),
        ("MOST_TOKENS", 5, "5 tokens are over 4"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(triton_backend, name, fits)
            gated_norm(*inputs)
            patch.setattr(triton_backend, name, fits - 1)
            with pytest.raises(ValueError, match=f"'triton' .* does not support .*: {reason}"):
                gated_norm(*inputs)
            with use_backend(None):
                gated_norm(*inputs)
