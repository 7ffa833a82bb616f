"""gated_norm and swiglu on a GPU: values, PyTorch's machinery, size, memory."""

import pytest
import torch

from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt.ops import gated_norm, swiglu, use_backend
from vision_ttt.ops.gated_norm import triton_backend

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def ungated(z, weight, bias):
    return gated_norm(z, None, weight, bias)


def norm_inputs(batch, length, parts, dim, dtype=torch.bfloat16, parameters=torch.float32):
    return (
        random(batch, length, parts * dim, dtype=dtype),
        2 * random(batch, length, dim, dtype=dtype, seed=1),
        1 + random(parts, dim, dtype=parameters, seed=2) / 3,
        random(parts, dim, dtype=parameters, seed=3),
    )


def solve(function, *inputs, grad):
    """The output and the gradients of all inputs, given that of the output."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))


def check(function, *inputs):
    out = function(inputs[0].detach().requires_grad_(), *inputs[1:])
    assert "vision_ttt" in out.grad_fn.name(), out.grad_fn.name()
    grad = random(*out.shape, dtype=out.dtype, seed=4)
    got = solve(function, *inputs, grad=grad)
    wanted = solve(function, *(x.double() for x in inputs), grad=grad)
    assert_close(got[0], wanted[0], FORWARD[inputs[0].dtype], "output")
    for index, x in enumerate(inputs):
        assert got[1 + index].dtype == x.dtype
        if wanted[1 + index].abs().max() < 1e-12:  # of one number, which a norm sets to 0
            assert got[1 + index].float().abs().max() < 1e-3  # a rounding error over √eps
            continue
        assert_close(got[1 + index], wanted[1 + index], GRADIENT[x.dtype], f"gradient {index}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("dim", [1, 24, 33, 192, 384, 600, 768, 2048])
def test_gated_norm(dim, parts, dtype):
    for batch, length in ((1, 1), (3, 197)):
        for parameters in {dtype, torch.float32}:
            z, gate, weight, bias = norm_inputs(batch, length, parts, dim, dtype, parameters)
            check(gated_norm, z, gate, weight, bias)
            check(ungated, z, weight, bias)


def test_gated_norm_of_many_tokens():
    """More than one tile to each program of either pass."""
    check(gated_norm, *norm_inputs(64, 1024, 2, 192))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_norm_of_the_widest_tiles(dtype):
    for parts in (1, 2, 8):
        dim = triton_backend.LARGEST_TILE // parts
        check(gated_norm, *norm_inputs(2, 19, parts, dim, dtype))
    inputs = norm_inputs(1, 3, 2, triton_backend.LARGEST_TILE)
    out = gated_norm(inputs[0].requires_grad_(), *inputs[1:])
    assert "vision_ttt" not in out.grad_fn.name()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 24, 33, 192, 512, 600, 2048])
def test_swiglu(hidden, dtype):
    for shape in ((1, 2 * hidden), (3, 197, 2 * hidden), (2, 3, 5, 2 * hidden)):
        x = 2 * random(*shape, dtype=dtype)
        check(swiglu, x)


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_strided_views_at_any_address(offset):
    """No 16-byte alignment to rely on but where there is one."""
    z, gate, weight, bias = norm_inputs(3, 83, 2, 192)
    grad = random(3, 83, 192, seed=4)
    views = []
    for x in (z, gate, grad):
        wide = torch.full((3, 85, x.shape[-1] + offset + 8), float("nan"), device="cuda").to(
            x.dtype
        )
        views.append(wide[:, 1:84, offset : offset + x.shape[-1]].copy_(x))
    wanted = solve(gated_norm, z, gate, weight, bias, grad=grad)
    got = solve(gated_norm, *views[:2], weight, bias, grad=views[2])
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    wanted, got = solve(swiglu, z, grad=grad), solve(swiglu, views[0], grad=views[2])
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_compiles_as_one_graph_and_for_any_length():
    for function in (gated_norm, swiglu):
        compiled = torch.compile(function, fullgraph=True, dynamic=True)
        for length in (83, 16, 197):
            inputs = norm_inputs(2, length, 2, 48)
            inputs = inputs[:1] if function is swiglu else inputs
            grad = random(2, length, 48, seed=4)
            wanted = solve(function, *inputs, grad=grad)
            got = solve(compiled, *inputs, grad=grad)
            for result, exact in zip(got, wanted, strict=True):
                assert_close(result, exact, 1e-2)


def test_cuda_graph_of_a_training_step():
    """Captured once, replayed on other numbers: the same as without a graph."""
    inputs, grad = norm_inputs(2, 83, 2, 192), random(2, 83, 192, seed=4)

    def step():
        return *solve(gated_norm, *inputs, grad=grad), *solve(swiglu, inputs[0], grad=grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles the kernels, which a capture cannot
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for index, x in enumerate((*inputs, grad)):
        x.copy_(random(*x.shape, dtype=x.dtype, seed=7 + index))
    graph.replay()
    replayed = [x.clone() for x in captured]
    assert all(torch.equal(a, b) for a, b in zip(replayed, step(), strict=True))


def test_equal_bits_twice():
    inputs, grad = norm_inputs(64, 1024, 2, 192), random(64, 1024, 192, seed=4)
    first, second = (solve(gated_norm, *inputs, grad=grad) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_autocast_keeps_the_projections_dtype():
    """Its calls bypass the dispatcher, as others do."""
    z, gate, weight, bias = norm_inputs(2, 83, 2, 48)
    z.requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for out, op in ((gated_norm(z, gate, weight, bias), "gated_norm"), (swiglu(z), "swiglu")):
            assert out.dtype == torch.bfloat16
            assert out.grad_fn.name() == f"vision_ttt_{op}Backward"


def test_other_backends_and_dtypes_go_through_pytorch():
    inputs = norm_inputs(2, 9, 2, 48, torch.float64, torch.float64)
    z = inputs[0].requires_grad_()
    assert "vision_ttt" not in gated_norm(*inputs).grad_fn.name()
    assert "vision_ttt" not in swiglu(z).grad_fn.name()
    with use_backend("dual"):
        z = norm_inputs(2, 9, 2, 48)[0].requires_grad_()
        assert "vision_ttt" not in swiglu(z).grad_fn.name()


def test_memory_of_a_step_is_that_of_its_results():
    """Views of one projection are taken as they are; shares of ∂γ and ∂β stay small."""
    batch, length, dim = 32, 1024, 384
    wide = random(batch, length, 6 * dim)
    grad = random(batch, length, 2 * dim)[..., :dim]
    _, _, weight, bias = norm_inputs(1, 1, 2, dim)
    leaves = [x.detach().requires_grad_() for x in (wide[..., : 2 * dim], wide[..., -dim:])]
    one = batch * length * dim * 2

    def step():
        out = gated_norm(*leaves, weight, bias)
        return out, torch.autograd.grad(out, leaves, grad)

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    # Of which 4: out, ∂z, ∂gate. PyTorch's sum of the shares takes twice their memory.
    assert torch.cuda.max_memory_allocated() - before <= 5 * one


def test_offsets_beyond_32_bits():
    """More than 2³¹ numbers: the last tokens equal the same computed alone."""
    batch, length, dim = 44, 65_536, 768
    assert batch * length * dim > 2**31
    z = random(1, length, dim).expand(batch, -1, -1).contiguous()
    z[-1] = random(length, dim, seed=5)
    _, _, weight, bias = norm_inputs(1, 1, 1, dim)
    got = solve(gated_norm, z, z, weight, bias, grad=z)
    alone = solve(gated_norm, z[-1:], z[-1:], weight, bias, grad=z[-1:])
    assert all(torch.equal(a[-1:], b) for a, b in zip(got[:3], alone[:3], strict=True))
    del got
    grad = z[..., : dim // 2]
    got, alone = solve(swiglu, z, grad=grad), solve(swiglu, z[-1:], grad=grad[-1:])
    assert all(torch.equal(a[-1:], b) for a, b in zip(got, alone, strict=True))
