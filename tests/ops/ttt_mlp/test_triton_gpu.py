"""The Triton backend of ttt_mlp on a GPU: what it serves, PyTorch's machinery, memory."""

import pytest
import torch

from learner_calls import in_one_call
from tolerances import FORWARD, GRADIENT, assert_close
from ttt_mlp_problems import OP, STATE, as_float64, make_problem, solve
from vision_ttt.ops import ttt_mlp, use_backend

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def make_gpu_problem(*shape, **options):
    problem = make_problem(*shape, **options)
    return {name: x.detach().cuda().requires_grad_() for name, x in problem.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 32, 64, 128])
@pytest.mark.parametrize("mini_batch_size", [3, 16, 100])
@torch.no_grad()
def test_outputs_and_states(dtype, dim, mini_batch_size):
    """One token, one mini-batch, a ragged end; with norm and scale and without."""
    options = {"mini_batch_size": mini_batch_size, "return_state": True}
    for length, reverse_heads, norm in ((1, 0, True), (mini_batch_size, 3, False), (150, 1, True)):
        kind = {"norm": norm, "scale": "per head" if norm else None}
        problem = make_gpu_problem(2, length, 3, dim, mini_batch_size, **kind, dtype=dtype)
        options["reverse_heads"] = reverse_heads
        o, state = in_one_call("ttt_mlp", **problem, backend="triton", **options)
        wanted, exact = in_one_call("ttt_mlp", **as_float64(problem), backend="dual", **options)
        assert_close(o, wanted, FORWARD[dtype], "o")
        for name, got, x in zip(STATE, state, exact, strict=True):
            assert_close(got, x, FORWARD[dtype], name)


def check(problem, dtype, **options):
    # The dual form in float64 stands in for the reference, which it is to ten digits. A gradient
    # goes through more rounded products than ttt_linear's, for which the tolerances are.
    slack = 1.5 if dtype == torch.bfloat16 else 1
    wanted = solve(as_float64(problem), backend="dual", **options)
    got = solve(problem, backend="triton", **options)
    for name, value in wanted.items():
        tolerance = slack * GRADIENT[dtype] if name.startswith("grad") else FORWARD[dtype]
        assert_close(got[name], value, tolerance, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("mini_batch_size", [3, 16, 40])
@pytest.mark.parametrize(("norm", "scale"), [(True, "per head"), (True, None), (False, "shared")])
def test_gradients(dtype, dim, mini_batch_size, norm, scale):
    """Several kept states at d = 16, with a ragged end; heads in both directions."""
    problem = make_gpu_problem(2, 300, 3, dim, mini_batch_size, norm=norm, scale=scale, dtype=dtype)
    check(problem, dtype, mini_batch_size=mini_batch_size, reverse_heads=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_state_per_image_and_eps(dtype):
    problem = make_gpu_problem(3, 83, 2, 64, 16, state_per_image=True, dtype=dtype)
    check(problem, dtype, mini_batch_size=16, reverse_heads=1, eps=0.1)


def test_a_long_sequence():
    check(make_gpu_problem(1, 3200, 2, 64, 16, dtype=torch.bfloat16), torch.bfloat16)


def test_it_is_what_serves_by_default(monkeypatch):
    runs = []
    kernel = OP.backends["triton"]
    counted = kernel._replace(forward=lambda *a: (runs.append(1), kernel.forward(*a))[1])
    monkeypatch.setitem(OP.backends, "triton", counted)
    ttt_mlp(**make_gpu_problem(dim=64, dtype=torch.bfloat16), mini_batch_size=4)
    ttt_mlp(**make_gpu_problem(dim=48, dtype=torch.bfloat16), mini_batch_size=4)  # dual's
    ttt_mlp(**make_gpu_problem(dtype=torch.float64), mini_batch_size=4)  # dual's
    assert len(runs) == 1


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


def test_compiles_as_one_graph_and_for_any_length():
    options = {"mini_batch_size": 16, "reverse_heads": 1}
    compiled = torch.compile(ttt_mlp, fullgraph=True, dynamic=True)
    for length in (83, 16):
        problem = make_gpu_problem(2, length, 3, 32, 16, dtype=torch.bfloat16)
        wanted = ttt_mlp(**problem, **options)
        got = compiled(**problem, **options)
        assert torch.equal(got, wanted)
        (gradient,), (expected,) = (
            torch.autograd.grad(o.sum(), problem["w1"]) for o in (got, wanted)
        )
        assert torch.equal(gradient, expected)


def test_cuda_graph_replays_a_training_step():
    problem = make_gpu_problem(2, 83, 3, 64, 16, dtype=torch.bfloat16)

    def step():
        o = ttt_mlp(**problem, reverse_heads=1, backend="triton")
        return [o, *torch.autograd.grad(o, list(problem.values()), torch.ones_like(o))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles the kernels, which a capture cannot
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
        o, state = ttt_mlp(**problem, backend="triton", return_state=True)
    assert o.dtype == torch.bfloat16
    assert state.w1.dtype == torch.float32


@pytest.mark.parametrize("mini_batch_size", [16, 40])
def test_gradients_are_equal_to_the_bit_twice(mini_batch_size):
    problem = make_gpu_problem(8, 800, 6, 64, mini_batch_size, dtype=torch.bfloat16)
    options = {"mini_batch_size": mini_batch_size, "reverse_heads": 3, "backend": "triton"}
    first, second = (solve(problem, **options) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_memory_of_a_training_step_is_of_the_order_of_its_tensors():
    """One unit is a view in bfloat16; float32 states every 8 d tokens take two and some."""
    batch, length, heads, dim = 4, 6400, 6, 64
    small = make_gpu_problem(batch, 1, heads, dim, 16, dtype=torch.bfloat16)
    views = torch.randn(3, batch, length, heads, dim, device="cuda", dtype=torch.bfloat16)
    problem = small | {n: x.requires_grad_() for n, x in zip("qkv", views, strict=True)}
    problem["eta"] = (torch.rand(batch, length, heads, device="cuda") * 0.3 / dim).requires_grad_()
    one = views[0].numel() * views.element_size()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o = ttt_mlp(**problem, reverse_heads=3, backend="triton")
    kept = torch.cuda.memory_allocated()
    torch.autograd.grad(o, list(problem.values()), torch.ones_like(o))
    assert kept - before <= 3.5 * one  # o and the states
    # o, its gradient, the states twice, ∂q ∂k ∂v, Z1 of 4 d units, x̂ in float32
    assert torch.cuda.max_memory_allocated() - before <= 17 * one


def test_a_model_takes_it():
    from vision_ttt.layers import TTTMLP

    torch.manual_seed(0)
    layer = TTTMLP(192, 3).cuda()
    tokens = torch.randn(2, 196, 192, device="cuda", requires_grad=True)
    outcomes = []
    for backend in ("triton", "dual"):
        with use_backend(backend):
            z = layer(tokens)
            outcomes.append((z, *torch.autograd.grad(z.square().mean(), [tokens])))
    for got, wanted in zip(*outcomes, strict=True):
        assert_close(got, wanted, 1e-4)
