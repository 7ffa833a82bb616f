"""Parts of mini-batches by the Triton kernels, interpreted, against the definition in float64."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import ttt_linear_problems
import ttt_mlp_problems
from tolerances import assert_close
from vision_ttt.ops import LinearState, MLPState, ttt_linear, ttt_mlp
from vision_ttt.ops.ttt_linear.op import PART as LINEAR_PART
from vision_ttt.ops.ttt_mlp.op import PART as MLP_PART

pytest.importorskip("triton")
pytestmark = pytest.mark.interpreted

OPS = {"ttt_linear": ttt_linear, "ttt_mlp": ttt_mlp}
KINDS = {"ttt_linear": LinearState, "ttt_mlp": MLPState}
PARTS = {"ttt_linear": LINEAR_PART, "ttt_mlp": MLP_PART}
PROBLEMS = {"ttt_linear": ttt_linear_problems, "ttt_mlp": ttt_mlp_problems}
TOKENS = ("q", "k", "v", "eta")
each_op = pytest.mark.parametrize("op", OPS)


def make(op: str, length: int, size: int, **options) -> dict[str, Tensor]:
    options.setdefault("dtype", torch.float32)
    problem = PROBLEMS[op].make_problem(2, length, 1, 16, size, **options)
    return {name: x.detach() for name, x in problem.items()}


def tokens_of(problem: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {n: x[:, start:stop] if n in TOKENS else x for n, x in problem.items()}


@pytest.fixture
def runs(monkeypatch) -> list[int]:
    """The tokens of each call that the kernels have served."""
    seen = []
    for part in PARTS.values():
        own = part.backends["triton"]

        def compute(inputs, own=own):
            seen.append(inputs.q.shape[1])
            return own.forward(inputs)

        monkeypatch.setitem(part.backends, "triton", own._replace(forward=compute))
    return seen


@each_op
@pytest.mark.parametrize(
    ("size", "cuts", "served", "options"),
    [
        # Within a mini-batch, up to its end, over it, and into the next one
        (4, (0, 1, 3, 4, 9, 10), [1, 2, 1, 1, 1], {"scale": "per head"}),
        (4, (0, 3, 5), [3, 1, 1], {"scale": None, "norm": False, "dtype": torch.bfloat16}),
        (40, (0, 18, 40, 45), [18, 22, 5], {"scale": "shared"}),  # of several tiles
    ],
)
def test_outputs_and_states(op, size, cuts, served, options, runs):
    problem = make(op, cuts[-1], size, **options)
    exact = {n: x.double() for n, x in problem.items()}
    low = problem["q"].dtype == torch.bfloat16
    state = exact_state = None
    for start, stop in pairwise(cuts):
        given = {"mini_batch_size": size, "return_state": True}
        tokens = tokens_of(problem, start, stop)
        o, state = OPS[op](**tokens, **given, state=state, backend="triton")
        tokens = tokens_of(exact, start, stop)
        wanted, exact_state = OPS[op](**tokens, **given, state=exact_state, backend="dual")
        assert o.dtype == problem["q"].dtype
        assert_close(o, wanted, 1e-2 if low else 1e-5)
        for name, x, y in zip(state._fields, state[:-1], exact_state[:-1], strict=False):
            assert x.dtype == torch.float32
            assert_close(x, y, 1e-2 if low else 1e-5, name)
        assert state.position == exact_state.position
    assert runs == served


@each_op
def test_sequences_at_different_places(op, runs):
    """Each goes on at its own place; a full mini-batch begins the next, and empty sums are NaN."""
    problem = make(op, 5, 4)
    rows = []
    for row, length in enumerate((0, 3)):
        own = {n: x[row : row + 1] if n in TOKENS else x for n, x in problem.items()}
        given = {"mini_batch_size": 4, "return_state": True, "backend": "dual"}
        _, state = OPS[op](**tokens_of(own, 0, 1 + length), **given)
        rows.append(state._replace(position=torch.tensor([state.position])))
    state = KINDS[op](*(torch.cat(x) for x in zip(*rows, strict=True)))
    assert state.position.tolist() == [1, 0]
    sums = [name for name in state._fields if name.startswith("sum_")]
    for name in sums:
        getattr(state, name)[1] = float("nan")
    for _ in range(4):
        token = tokens_of(problem, 4, 5)
        given = {"mini_batch_size": 4, "return_state": True, "state": state}
        o, after = OPS[op](**token, **given, backend="triton")
        for backend in ("cpu", "dual"):
            wanted, exact = OPS[op](**token, **given, backend=backend)
            assert_close(o, wanted, 1e-5)
            for name, x, y in zip(state._fields, after, exact, strict=True):
                assert_close(x, y, 1e-5, name)
        state = after
    assert state.position.tolist() == [1, 0]
    assert runs == [1] * 4


@each_op
def test_only_outputs(op, runs):
    problem = make(op, 20, 40)
    _, state = OPS[op](**tokens_of(problem, 0, 2), mini_batch_size=40, return_state=True)
    tokens = tokens_of(problem, 2, 20)
    before = [x.clone() for x in state[:-1]]
    o = OPS[op](**tokens, mini_batch_size=40, state=state, backend="triton")
    wanted = OPS[op](**tokens, mini_batch_size=40, state=state, backend="dual")
    assert_close(o, wanted, 1e-5)
    assert all(torch.equal(x, y) for x, y in zip(state[:-1], before, strict=True))
    assert runs == [18]


@each_op
def test_gradients_go_by_pytorch_s_operations(op, runs):
    problem = make(op, 3, 4)
    problem["q"].requires_grad_()
    o, _ = OPS[op](**problem, mini_batch_size=4, return_state=True, backend="triton")
    assert o.requires_grad
    assert not runs
