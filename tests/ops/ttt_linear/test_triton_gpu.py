"""The Triton backend on a GPU: the grid of what it serves, PyTorch's machinery, size, memory."""

import pytest
import torch

from tolerances import FORWARD, GRADIENT, assert_close
from ttt_linear_problems import OP, as_float64, make_problem, solve
from vision_ttt.ops import ttt_linear, use_backend
from vision_ttt.ops.ttt_linear.triton_backend import UNNORMED

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KINDS = [(True, "per head"), (True, "shared"), (False, None)]  # inner norm, position scale
NAMES = ("q", "k", "v", "eta", "w0", "b0", "ln_weight", "ln_bias", "position_scale")


def make_gpu_problem(*shape, **options):
    problem = make_problem(*shape, **options)
    return {name: x.detach().cuda().requires_grad_() for name, x in problem.items()}


def check(problem, dtype, **options):
    # The dual form in float64 stands in for the reference, which it is to ten digits.
    wanted = solve(as_float64(problem), backend="dual", **options)
    got = solve(problem, backend="triton", **options)
    for name, value in wanted.items():
        tolerance = (GRADIENT if name.startswith("grad") else FORWARD)[dtype]
        if name == "grad position_scale":  # a sum over all mini-batches that nearly cancels
            tolerance *= 1.5
        assert_close(got[name], value, tolerance, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 32, 64, 128])
@pytest.mark.parametrize("mini_batch_size", [3, 16, 32, 100])
@pytest.mark.parametrize(("norm", "scale"), KINDS)
def test_grid(dtype, dim, mini_batch_size, norm, scale):
    """One token, one mini-batch, several kept states with a ragged end; every split of heads."""
    if not norm and dim not in UNNORMED:
        with pytest.raises(ValueError, match=f"without a norm, head dimension {dim} is not one of"):
            solve(make_gpu_problem(dim=dim, norm=False, scale=None, dtype=dtype), backend="triton")
        return
    for length, reverse_heads in ((1, 0), (mini_batch_size, 3), (600, 1)):
        shape = (2, length, 3, dim, mini_batch_size)
        problem = make_gpu_problem(*shape, norm=norm, scale=scale, dtype=dtype)
        check(problem, dtype, mini_batch_size=mini_batch_size, reverse_heads=reverse_heads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_state_per_image_and_eps(dtype):
    problem = make_gpu_problem(3, 83, 2, 64, 16, state_per_image=True, dtype=dtype)
    check(problem, dtype, mini_batch_size=16, reverse_heads=1, eps=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_long_sequence(dtype):
    check(make_gpu_problem(2, 6400, 4, 64, 16, dtype=dtype), dtype, reverse_heads=2)


@torch.no_grad()
def test_many_programs_that_share_multiprocessors():
    """Inference with more than two programs for each, which tries a limit of registers."""
    problem = make_gpu_problem(300, 40, 4, 64, 16, scale="per head", dtype=torch.bfloat16)
    o, state = ttt_linear(**problem, reverse_heads=2, return_state=True, backend="triton")
    exact = ttt_linear(**as_float64(problem), reverse_heads=2, return_state=True, backend="dual")
    assert_close(o, exact[0], FORWARD[torch.bfloat16], "o")
    for got, wanted in zip(state[:2], exact[1][:2], strict=True):
        assert_close(got, wanted, FORWARD[torch.bfloat16], "state")


def test_tf32_is_used_only_when_asked_for():
    problem = make_gpu_problem(2, 400, 3, 64, 16, dtype=torch.float32)
    exact = ttt_linear(**as_float64(problem), backend="dual")
    before = torch.backends.cuda.matmul.fp32_precision
    errors = {}
    try:
        for precision in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            o = ttt_linear(**problem, backend="triton")
            errors[precision] = ((o - exact).abs().max() / exact.abs().max()).item()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert errors["ieee"] < 1e-5 < errors["tf32"] < 2e-3


def test_it_is_what_serves_by_default(monkeypatch):
    runs = []
    kernel = OP.backends["triton"]
    counted = kernel._replace(forward=lambda *a: (runs.append(1), kernel.forward(*a))[1])
    monkeypatch.setitem(OP.backends, "triton", counted)
    ttt_linear(**make_gpu_problem(dim=64, dtype=torch.bfloat16), mini_batch_size=4)
    ttt_linear(**make_gpu_problem(dim=48, dtype=torch.bfloat16), mini_batch_size=4)  # dual's
    ttt_linear(**make_gpu_problem(dtype=torch.float64), mini_batch_size=4)  # dual's
    assert len(runs) == 1


def test_strided_views_of_one_projection_without_a_copy():
    batch, length, heads, dim = 4, 4096, 6, 64
    fused = torch.randn(batch, length, 3 * heads * dim, device="cuda", dtype=torch.bfloat16)
    views = [x.unflatten(-1, (heads, dim)) for x in fused.split(heads * dim, dim=-1)]
    others = make_gpu_problem(batch, 1, heads, dim, 16, dtype=torch.bfloat16)
    others["eta"] = torch.rand(batch, length, heads, device="cuda") / dim
    strided = others | dict(zip("qkv", views, strict=True))
    packed = others | {name: x.contiguous() for name, x in zip("qkv", views, strict=True)}
    with torch.no_grad():
        wanted = ttt_linear(**packed, reverse_heads=3, backend="triton")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        o = ttt_linear(**strided, reverse_heads=3, backend="triton")
        peak = torch.cuda.max_memory_allocated() - before
    assert torch.equal(o, wanted)
    states = 2 * 4 * batch * heads * dim * (dim + 1)
    assert peak <= 1.1 * o.numel() * o.element_size() + states  # no room for a copy of q, k or v


@pytest.mark.parametrize("offset", [1, 3])
def test_views_that_start_at_odd_addresses(offset):
    """No 16-byte alignment to rely on: the compiler must have been told."""
    problem = make_gpu_problem(2, 83, 3, 64, 16, dtype=torch.bfloat16)
    wanted = solve(problem, backend="triton")
    moved = dict(problem)
    for name in "qkv":
        wide = torch.zeros(2, 83, 3, 64 + 5, device="cuda", dtype=torch.bfloat16)
        wide[..., offset : offset + 64] = problem[name].detach()
        moved[name] = wide[..., offset : offset + 64].requires_grad_()
    got = solve(moved, backend="triton")
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("backend", [None, "triton"])
def test_compiles_as_one_graph_and_for_any_length(backend):
    options = {"mini_batch_size": 16, "reverse_heads": 1, "backend": backend}
    compiled = torch.compile(ttt_linear, fullgraph=True, dynamic=True)
    for length in (83, 16, 197):
        problem = make_gpu_problem(2, length, 3, 32, 16, dtype=torch.bfloat16)
        wanted = solve(problem, **options)
        got = solve(problem, function=compiled, **options)
        for name, value in wanted.items():
            assert_close(got[name], value, 1e-2, name)


def test_cuda_graph_of_a_training_step():
    """Captured once, replayed on other numbers: the same as without a graph."""
    options = {"mini_batch_size": 16, "reverse_heads": 1, "backend": "triton"}
    problem = make_gpu_problem(2, 83, 3, 64, 16, dtype=torch.bfloat16)
    weights = torch.randn(2, 83, 3, 64, device="cuda", dtype=torch.bfloat16)

    def step():
        o = ttt_linear(**problem, **options)
        return o, *torch.autograd.grad((o * weights).sum(), list(problem.values()))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles and times the kernels, which a capture cannot
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    fresh = make_gpu_problem(2, 83, 3, 64, 16, dtype=torch.bfloat16, seed=7)
    with torch.no_grad():
        for name, x in problem.items():
            x.copy_(fresh[name])
    graph.replay()
    replayed = [x.clone() for x in captured]
    assert all(torch.equal(a, b) for a, b in zip(replayed, step(), strict=True))


def test_autocast():
    problem = make_gpu_problem(2, 83, 3, 64, 16, dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        o, (w, *_) = ttt_linear(**problem, backend="triton", return_state=True)
    assert o.dtype == torch.bfloat16
    assert w.dtype == torch.float32


def test_gradients_are_equal_to_the_bit_twice():
    problem = make_gpu_problem(8, 1600, 6, 64, 16, dtype=torch.bfloat16)
    first, second = (solve(problem, backend="triton", reverse_heads=3) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_deterministic_algorithms_are_not_chosen_by_a_clock():
    problem = make_gpu_problem(2, 83, 3, 64, 16, dtype=torch.bfloat16)
    wanted = solve(problem, backend="triton")
    torch.use_deterministic_algorithms(True)
    try:
        got = solve(problem, backend="triton")
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in wanted.items():
        assert_close(got[name], value, 1e-2, name)


def test_other_streams_and_threads_of_work():
    problem = make_gpu_problem(2, 400, 3, 64, 16, dtype=torch.bfloat16)
    wanted = solve(problem, backend="triton")
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            results.append(solve(problem, backend="triton"))
    torch.cuda.synchronize()
    for result in results:
        assert all(torch.equal(result[name], wanted[name]) for name in wanted)


def test_memory_of_a_training_step_is_of_the_order_of_its_tensors():
    """One unit is a view in bfloat16; float32 states every 4 d tokens take half of one."""
    batch, length, heads, dim = 8, 6400, 6, 64
    small = make_gpu_problem(batch, 1, heads, dim, 16, dtype=torch.bfloat16)
    views = torch.randn(3, batch, length, heads, dim, device="cuda", dtype=torch.bfloat16)
    problem = small | {n: x.requires_grad_() for n, x in zip("qkv", views, strict=True)}
    problem["eta"] = (torch.rand(batch, length, heads, device="cuda") / dim).requires_grad_()
    one = views[0].numel() * views.element_size()

    def step():
        o = ttt_linear(**problem, reverse_heads=3, backend="triton")
        kept = torch.cuda.memory_allocated()
        return kept, torch.autograd.grad(o, list(problem.values()), torch.ones_like(o))

    step()  # timing the kernels takes copies
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept, _ = step()
    assert kept - before <= 1.7 * one  # o and the states
    # o, its gradient, the states, ∂q ∂k ∂v, ∂Z_q and x̂; the rest is per token or per segment
    assert torch.cuda.max_memory_allocated() - before <= 8.5 * one


def test_a_million_tokens():
    length, heads, dim = 1_000_000, 2, 64
    small = make_gpu_problem(1, 1, heads, dim, 16, dtype=torch.bfloat16)
    views = torch.randn(3, 1, length, heads, dim, device="cuda", dtype=torch.bfloat16)
    eta = torch.rand(1, length, heads, device="cuda") / dim
    problem = small | {n: x.requires_grad_() for n, x in zip("qkv", views, strict=True)}
    problem["eta"] = eta.requires_grad_()
    o, (w, *_) = ttt_linear(**problem, reverse_heads=1, backend="triton", return_state=True)
    (o.float().mean() + w.mean()).backward()
    assert all(torch.isfinite(x.grad).all() for x in problem.values())
    # The first tokens in scan order cannot know how many follow.
    head = {
        n: x.detach()[:, :1600] if n in ("q", "k", "v", "eta") else x.detach()
        for n, x in problem.items()
    }
    start = ttt_linear(**as_float64(head), backend="dual")
    assert_close(o[:, :1600, 0], start[:, :, 0], FORWARD[torch.bfloat16])
    tail = {
        n: x.detach()[:, -1600:] if n in ("q", "k", "v", "eta") else x.detach()
        for n, x in problem.items()
    }
    start = ttt_linear(**as_float64(tail), reverse_heads=1, backend="dual")
    assert_close(o[:, -1600:, 1], start[:, :, 1], FORWARD[torch.bfloat16])


def test_offsets_beyond_32_bits():
    """B·T·H·d > 2³¹: the last image and head equal the same computed alone."""
    batch, length, heads, dim = 44, 65_536, 12, 64
    assert batch * length * heads * dim > 2**31
    small = make_gpu_problem(batch, 1, heads, dim, 16, scale=None, dtype=torch.bfloat16)
    shape = (batch, length, heads, dim)
    q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    v = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    eta = torch.rand(batch, length, heads, device="cuda") / dim
    problem = small | {"q": q, "k": q, "v": v, "eta": eta}
    problem = {name: x.detach().requires_grad_(name == "v") for name, x in problem.items()}
    o = ttt_linear(**problem, reverse_heads=6, backend="triton")
    (dv,) = torch.autograd.grad(o, problem["v"], q)
    alone = {
        name: (x[-1:, :, -1:] if name in ("q", "k", "v", "eta") else x[-1:]).detach()
        for name, x in problem.items()
    }
    alone = {name: x.contiguous().requires_grad_(name == "v") for name, x in alone.items()}
    o_alone = ttt_linear(**alone, reverse_heads=1, backend="triton")
    (dv_alone,) = torch.autograd.grad(o_alone, alone["v"], q[-1:, :, -1:])
    assert_close(o[-1:, :, -1:], o_alone, 1e-2)
    assert_close(dv[-1:, :, -1:], dv_alone, 2e-2)


def test_a_model_takes_it():
    from vision_ttt.layers import TTTLinear

    torch.manual_seed(0)
    layer = TTTLinear(192, 3).cuda()
    tokens = torch.randn(2, 196, 192, device="cuda", requires_grad=True)
    outcomes = []
    for backend in ("triton", "dual"):
        with use_backend(backend):
            z = layer(tokens)
            outcomes.append((z, *torch.autograd.grad(z.square().mean(), [tokens])))
    for got, wanted in zip(*outcomes, strict=True):
        assert_close(got, wanted, 1e-4)
