"""Parts of mini-batches by the Triton kernels on a GPU: decoding, and what PyTorch makes of it."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import ttt_linear_problems
import ttt_mlp_problems
from tolerances import FORWARD, assert_close
from vision_ttt.ops import ttt_linear, ttt_mlp

pytestmark = pytest.mark.gpu

OPS = {"ttt_linear": ttt_linear, "ttt_mlp": ttt_mlp}
PROBLEMS = {"ttt_linear": ttt_linear_problems, "ttt_mlp": ttt_mlp_problems}
TOKENS = ("q", "k", "v", "eta")
each_op = pytest.mark.parametrize("op", OPS)


def make(op: str, length: int, size: int, dim: int = 64, **options) -> dict[str, Tensor]:
    options.setdefault("dtype", torch.bfloat16)
    problem = PROBLEMS[op].make_problem(3, length, 4, dim, size, **options)
    return {name: x.detach().cuda() for name, x in problem.items()}


def tokens_of(problem: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {n: x[:, start:stop] if n in TOKENS else x for n, x in problem.items()}


@each_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [16, 32, 64, 128])
@pytest.mark.parametrize(("norm", "scale"), [(True, "per head"), (False, None)])
def test_parts_are_as_the_dual_form(op, dtype, dim, norm, scale):
    """One token, several, several tiles; within a mini-batch and over its end."""
    problem = make(op, 75, 40, dim, norm=norm, scale=scale, dtype=dtype)
    exact = {n: x.double() for n, x in problem.items()}
    state = exact_state = None
    cuts = (0, 1, 3, 21, 40, 41, 75)
    for start, stop in pairwise(cuts):
        options = {"mini_batch_size": 40, "return_state": True}
        o, state = OPS[op](**tokens_of(problem, start, stop), **options, state=state)
        wanted, exact_state = OPS[op](
            **tokens_of(exact, start, stop), **options, state=exact_state, backend="dual"
        )
        assert_close(o, wanted, FORWARD[dtype])
        for name, x, y in zip(state._fields, state[:-1], exact_state[:-1], strict=False):
            assert_close(x, y, FORWARD[dtype], name)


@each_op
def test_sequences_at_different_places(op):
    problem = make(op, 6, 4, dtype=torch.float32)
    _, state = OPS[op](**tokens_of(problem, 0, 2), mini_batch_size=4, return_state=True)
    state = state._replace(position=torch.tensor([2, 0, 3], device="cuda"))
    exact = state
    for t in range(2, 6):
        options = {"mini_batch_size": 4, "return_state": True}
        token = tokens_of(problem, t, t + 1)
        o, state = OPS[op](**token, **options, state=state)
        wanted, exact = OPS[op](**token, **options, state=exact, backend="dual")
        assert_close(o, wanted, 1e-5)
        for name, x, y in zip(state._fields, state, exact, strict=True):
            assert_close(x, y, 1e-5, name)


@each_op
def test_a_token_is_a_launch_in_a_cuda_graph(op):
    """The kernel runs alone, and again from a graph, with other tokens and another state."""
    problem = make(op, 8, 16)
    given = {"mini_batch_size": 16, "return_state": True}
    _, state = OPS[op](**tokens_of(problem, 0, 3), **given)
    token = {n: x.clone() for n, x in tokens_of(problem, 3, 4).items()}
    OPS[op](**token, **given, state=state)  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        OPS[op](**token, **given, state=state)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type.name == "CUDA"]
    assert kernels == ["part_kernel"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, after = OPS[op](**token, **given, state=state)
    for name in TOKENS:
        token[name].copy_(problem[name][:, 5:6])
    graph.replay()
    wanted, exact = OPS[op](**token, **given, state=state)
    assert torch.equal(o, wanted)
    assert all(torch.equal(x, y) for x, y in zip(after[:-1], exact[:-1], strict=True))


@each_op
def test_compiled_steps(op):
    problem = make(op, 6, 4)
    torch._dynamo.reset()  # an int is a constant of what is compiled: a version for each place
    compiled = torch.compile(OPS[op], fullgraph=True)
    state = exact = None
    for t in range(6):
        given = {"mini_batch_size": 4, "return_state": True}
        token = tokens_of(problem, t, t + 1)
        with torch.no_grad():
            o, state = compiled(**token, **given, state=state)
            wanted, exact = OPS[op](**token, **given, state=exact)
        assert_close(o, wanted, 1e-2)
