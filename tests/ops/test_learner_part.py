"""Parts of mini-batches by the CPU kernels: as the definition, for any place, without gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ttt_linear_problems
import ttt_mlp_problems
from tolerances import assert_close
from vision_ttt.ops import _native, ttt_linear, ttt_mlp, use_backend
from vision_ttt.ops.ttt_linear.op import PART as LINEAR_PART
from vision_ttt.ops.ttt_mlp.op import PART as MLP_PART

OPS = {"ttt_linear": ttt_linear, "ttt_mlp": ttt_mlp}
PARTS = {"ttt_linear": LINEAR_PART, "ttt_mlp": MLP_PART}
PROBLEMS = {"ttt_linear": ttt_linear_problems, "ttt_mlp": ttt_mlp_problems}
TOKENS = ("q", "k", "v", "eta")
SIZE, LENGTH = 5, 13
each_op = pytest.mark.parametrize("op", OPS)

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(_native.LIBRARY is None, reason="the kernels are not built"),
]


def make(op: str, batch: int = 2, heads: int = 3, dim: int = 16, **options) -> dict[str, Tensor]:
    options.setdefault("dtype", torch.float32)
    problem = PROBLEMS[op].make_problem(batch, LENGTH, heads, dim, SIZE, **options)
    return {name: x.detach() for name, x in problem.items()}


def tokens_of(problem: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {n: x[:, start:stop] if n in TOKENS else x for n, x in problem.items()}


@pytest.fixture
def runs(monkeypatch) -> list[int]:
    """The tokens of each call that the kernels have served."""
    seen = []
    for part in PARTS.values():
        own = part.backends["cpu"]

        def compute(inputs, own=own):
            seen.append(inputs.q.shape[1])
            return own.forward(inputs)

        monkeypatch.setitem(part.backends, "cpu", own._replace(forward=compute))
    return seen


@each_op
@settings(max_examples=12, deadline=None)
@given(
    dim=st.sampled_from([16, 32, 64, 128]),
    scale=st.sampled_from([None, "shared", "per head"]),
    norm=st.booleans(),
    low=st.booleans(),
    cuts=st.sets(st.integers(1, LENGTH - 1), max_size=6).map(sorted),
)
def test_parts_are_as_the_definition(op, dim, scale, norm, low, cuts):
    """Outputs and every field of the state, wherever a sequence is cut."""
    problem = make(op, 1 + dim // 64, 2, dim, scale=scale, norm=norm)
    exact = {n: x.double() for n, x in problem.items()}
    tolerance = 1e-5
    if low:  # the state stays float32
        problem |= {n: problem[n].bfloat16() for n in "qkv"}
        exact |= {n: problem[n].double() for n in "qkv"}
    state = exact_state = None
    for start, stop in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        o, state = OPS[op](
            **tokens_of(problem, start, stop), mini_batch_size=SIZE, state=state, return_state=True
        )
        wanted, exact_state = OPS[op](
            **tokens_of(exact, start, stop),
            **{"mini_batch_size": SIZE, "state": exact_state},
            **{"return_state": True, "backend": "reference"},
        )
        assert o.dtype == problem["q"].dtype
        assert_close(o, wanted, 1e-2 if low else tolerance)
        for name, x, y in zip(state._fields, state[:-1], exact_state[:-1], strict=False):
            assert x.dtype == torch.float32
            assert_close(x, y, tolerance, name)
        assert state.position == exact_state.position


@each_op
def test_the_kernels_run_where_they_can(op, runs):
    """Without gradients, on float32 states, unless PyTorch's operations are asked for."""
    problem = make(op)
    first, rest = tokens_of(problem, 0, 3), tokens_of(problem, 3, 4)
    call = OPS[op]
    _, state = call(**first, mini_batch_size=SIZE, return_state=True)
    assert runs == [3]
    options = {"mini_batch_size": SIZE, "state": state}
    wanted = call(**rest, **options)
    assert runs == [3, 1]
    call(**rest, **options, backend="cpu")
    with torch.inference_mode():
        call(**rest, **options)
    assert runs == [3, 1, 1, 1]
    assert_close(call(**rest, **options, backend="dual"), wanted, 1e-5)
    with use_backend("reference"):
        assert_close(call(**rest, **options), wanted, 1e-5)
    wide = {n: x.double() for n, x in rest.items()}
    assert_close(call(**wide, **options), wanted, 1e-5)
    needs_grad = rest | {"ln_weight": rest["ln_weight"].requires_grad_()}
    assert call(**needs_grad, **options).requires_grad
    assert runs == [3, 1, 1, 1]
    with torch.no_grad():
        call(**needs_grad, **options)
    assert runs == [3, 1, 1, 1, 1]


@each_op
def test_states_are_never_written_to(op):
    problem = make(op)
    _, state = OPS[op](**tokens_of(problem, 0, 3), mini_batch_size=SIZE, return_state=True)
    for own in (state, state._replace(position=torch.tensor([3, 4]))):
        before = [x.clone() for x in own[:-1]]
        for stop in (4, 5):
            OPS[op](
                **tokens_of(problem, 3, stop), mini_batch_size=SIZE, state=own, return_state=True
            )
        assert all(map(torch.equal, before, own[:-1]))


@each_op
def test_sequences_at_different_places(op, runs):
    """Each is as alone, also where one of them completes its mini-batch."""
    problem, lengths, call = make(op, 3), [4, 10, 7], OPS[op]
    rows = []
    for row, length in enumerate(lengths):
        own = {n: x[row : row + 1, :length] if n in TOKENS else x for n, x in problem.items()}
        _, state = call(**own, mini_batch_size=SIZE, return_state=True)
        rows.append(state._replace(position=torch.tensor([state.position])))
    state = type(state)(*(torch.cat(x) for x in zip(*rows, strict=True)))
    following = {
        n: torch.stack([x[row, m : m + 3] for row, m in enumerate(lengths)]) if n in TOKENS else x
        for n, x in problem.items()
    }
    runs.clear()
    outputs, last = [], state
    for t in range(3):
        token = tokens_of(following, t, t + 1)
        o, last = call(**token, mini_batch_size=SIZE, state=last, return_state=True)
        outputs.append(o)
    assert runs == [1, 1, 1]
    o = torch.cat(outputs, dim=1)
    options = {"mini_batch_size": SIZE, "state": state, "return_state": True, "backend": "dual"}
    wanted, exact = call(**following, **options)
    assert last.position.tolist() == exact.position.tolist() == [2, 3, 0]
    for x, y in zip((o, *last[:-1]), (wanted, *exact[:-1]), strict=True):
        assert_close(x, y, 1e-5)
    assert not last[-2][2].any()  # no sums in a mini-batch without tokens
    for wrong in ([0, 5, 0], [0, -1, 0]):
        own = state._replace(position=torch.tensor(wrong))
        with pytest.raises(ValueError, match=r"state.position must be in 0 … 4, got"):
            call(**tokens_of(following, 0, 1), mini_batch_size=SIZE, state=own)


@each_op
@pytest.mark.parametrize("each", [False, True], ids=["one position", "positions"])
def test_the_custom_op(op, each):
    """Its shapes without content, its numbers beside PyTorch's, and what it refuses."""
    part, problem = PARTS[op], make(op)
    _, state = OPS[op](**tokens_of(problem, 0, 3), mini_batch_size=SIZE, return_state=True)
    names, count = list(problem), (len(state) - 1) // 3
    values = tokens_of(problem, 3, 4)
    start, sums = state[count : 2 * count], state[2 * count : 3 * count]
    norm = [values[n] for n in ("ln_weight", "ln_bias", "position_scale")]
    assert names[:4] == list(TOKENS)
    positions = torch.tensor([3, 0, 4, 0])[::2] if each else None  # not side by side in memory
    arguments = [*(values[n] for n in TOKENS), *start, *norm, *sums, positions]
    numbers = [0 if each else 3, SIZE, 1e-6, True]
    torch.library.opcheck(part.forward_op, (*arguments, *numbers))
    got = part.forward_op(*arguments, *numbers)
    wanted = part.definition(part.inputs(*arguments, *numbers))
    assert len(got) == 1 + count * (3 if each else 2)
    for x, y in zip(got, wanted, strict=True):
        assert_close(x, y, 1e-5)
    many = 2 if each else SIZE - 2
    longer = [x.repeat_interleave(many, dim=1) for x in arguments[:4]]
    message = "must be one token, got 2" if each else r"at most mini_batch_size=5, got 3 \+ 3"
    with pytest.raises(ValueError, match=message):
        part.forward_op(*longer, *arguments[4:], *numbers)


@each_op
def test_steps_are_exact_for_any_strides_and_threads(op):
    """Views of one projection, and results that depend on no number of threads."""
    problem = make(op, 3)
    wanted, last = OPS[op](**problem, mini_batch_size=SIZE, return_state=True)
    joined = torch.cat([problem[n] for n in "qkv"], dim=-1)
    views = dict(zip("qkv", joined.split(16, dim=-1), strict=True))
    threads = torch.get_num_threads()
    outputs, states = {}, {}
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            state, o = None, []
            for t in range(LENGTH):
                token = tokens_of(problem | views, t, t + 1)
                x, state = OPS[op](**token, mini_batch_size=SIZE, state=state, return_state=True)
                o.append(x)
            outputs[count], states[count] = torch.cat(o, dim=1), state
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(outputs[1], outputs[2])
    assert_close(outputs[1], wanted, 1e-5)
    for x, y, exact in zip(states[1][:-1], states[2][:-1], last[:-1], strict=True):
        assert torch.equal(x, y)
        assert_close(x, exact, 1e-5)
