"""Sequences in parts equal whole ones: the state of ttt_linear and ttt_mlp at any token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ttt_linear_problems
import ttt_mlp_problems
from tolerances import assert_close
from vision_ttt.ops import LinearState, MLPState, states, ttt_linear, ttt_mlp

OPS = {"ttt_linear": ttt_linear, "ttt_mlp": ttt_mlp}
KINDS = {"ttt_linear": LinearState, "ttt_mlp": MLPState}
PROBLEMS = {"ttt_linear": ttt_linear_problems, "ttt_mlp": ttt_mlp_problems}
CASES = [(op, backend) for op, problems in PROBLEMS.items() for backend in problems.BACKENDS]
TOKENS = ("q", "k", "v", "eta")
SIZE = 4


def in_parts(op: str, problem: dict[str, Tensor], cuts: list[int], **options):
    """o, the state after the last token and a state after each part, with calls between the cuts.

    The first part begins at the initial state, the last one asks for its state.
    """
    length = problem["q"].shape[1]
    outputs, found, state = [], [], None
    for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
        part = {n: x[:, start:stop] if n in TOKENS else x for n, x in problem.items()}
        o, state = OPS[op](**part, **options, state=state, return_state=True)
        outputs.append(o)
        found.append(state)
    return torch.cat(outputs, dim=1), state, found


def everything(o: Tensor, state, problem: dict[str, Tensor]) -> dict[str, Tensor]:
    """o, the state's first fields, and the gradients of a fixed projection of all of them."""
    generator = torch.Generator().manual_seed(1)
    count = (len(state) - 1) // 3
    loss = 0
    for x in (o, *state[:count]):
        weights = torch.randn(x.shape, dtype=torch.float64, generator=generator)
        loss = loss + (x.double() * weights).sum()
    gradients = torch.autograd.grad(loss, list(problem.values()))
    named = dict(zip(state._fields, state[:count], strict=False))
    return {"o": o, **named, **dict(zip(problem, gradients, strict=True))}


@pytest.mark.parametrize(("op", "backend"), CASES)
@settings(max_examples=6, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 20), max_size=3).map(sorted),
    scale=st.sampled_from([None, "shared", "per head"]),
    norm=st.booleans(),
)
def test_parts_equal_the_whole(op, backend, cuts, scale, norm):
    """Outputs, states and all gradients, wherever the sequence is cut; against the definition."""
    problems = PROBLEMS[op]
    dtype = problems.exact_dtype(backend)
    dim = 16 if dtype == torch.float32 else 4
    options = {"scale": scale, "norm": norm, "dtype": dtype}
    problem = problems.make_problem(2, 21, 2, dim, SIZE, **options)
    o, state, _ = in_parts(op, problem, cuts, mini_batch_size=SIZE, backend=backend)
    exact = {name: x.detach().double().requires_grad_() for name, x in problem.items()}
    whole = problems.solve(exact, mini_batch_size=SIZE, backend="reference")
    o_whole, state_whole = OPS[op](
        **exact, mini_batch_size=SIZE, backend="reference", return_state=True
    )
    got = everything(o, state, problem)
    wanted = everything(o_whole, state_whole, exact)
    assert_close(wanted["o"], whole["o"], 1e-12)
    for name, x in got.items():
        assert_close(x, wanted[name], 1e-5 if dtype == torch.float32 else 1e-10, name)
    assert state.position == 21 % SIZE


@pytest.mark.parametrize("op", OPS)
def test_token_by_token(op):
    """One token at a time, also without a wish for the state at the end."""
    problem = PROBLEMS[op].make_problem(2, 11, 2, 4, SIZE)
    o, state, _ = in_parts(op, problem, list(range(1, 11)), mini_batch_size=SIZE)
    wanted, last = OPS[op](**problem, mini_batch_size=SIZE, return_state=True)
    assert_close(o, wanted, 1e-12)
    for x, y in zip(state[:-1], last[:-1], strict=True):
        assert_close(x, y, 1e-12)
    first = {n: x[:, :7] if n in TOKENS else x for n, x in problem.items()}
    rest = {n: x[:, 7:] if n in TOKENS else x for n, x in problem.items()}
    _, state = OPS[op](**first, mini_batch_size=SIZE, return_state=True)
    assert_close(OPS[op](**rest, mini_batch_size=SIZE, state=state), wanted[:, 7:], 1e-12)


@pytest.mark.parametrize("op", OPS)
def test_sequences_at_different_places(op):
    """Rows whose mini-batches are at different tokens go on in one batch.

    The sums of a mini-batch without tokens are not read.
    """
    problem = {n: x.detach() for n, x in PROBLEMS[op].make_problem(3, 15, 2, 4, SIZE).items()}
    wanted = OPS[op](**problem, mini_batch_size=SIZE)
    lengths = [3, 8, 6]
    rows = []
    for row, length in enumerate(lengths):
        own = {n: x[row : row + 1, :length] if n in TOKENS else x for n, x in problem.items()}
        _, state = OPS[op](**own, mini_batch_size=SIZE, return_state=True)
        rows.append(state._replace(position=torch.tensor([state.position])))
    state = KINDS[op](*(torch.cat(x) for x in zip(*rows, strict=True)))
    assert state.position.tolist() == [3, 0, 2]
    for name in state._fields:
        if name.startswith("sum_"):
            getattr(state, name)[1] = float("nan")
    following = {
        n: torch.stack([x[row, m : m + 7] for row, m in enumerate(lengths)]) if n in TOKENS else x
        for n, x in problem.items()
    }
    token = {n: x[:, :1] if n in TOKENS else x for n, x in following.items()}
    o = OPS[op](**token, mini_batch_size=SIZE, state=state)
    for row, length in enumerate(lengths):
        assert_close(o[row], wanted[row, length : length + 1], 1e-12)
    o, state = OPS[op](**following, mini_batch_size=SIZE, state=state, return_state=True)
    for row, length in enumerate(lengths):
        assert_close(o[row], wanted[row, length : length + 7], 1e-12)
        until = {
            n: x[row : row + 1, : length + 7] if n in TOKENS else x for n, x in problem.items()
        }
        _, last = OPS[op](**until, mini_batch_size=SIZE, return_state=True)
        assert state.position[row] == last.position
        for x, y in zip(state[:-1], last[:-1], strict=True):
            assert_close(x[row], y[0], 1e-12)


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=5, deadline=None)
@given(
    parts=st.lists(st.lists(st.integers(0, 11), min_size=3, max_size=3), min_size=1, max_size=3),
    size=st.sampled_from([1, 4, 30]),
    scale=st.sampled_from([None, "shared", "per head"]),
)
def test_sequences_of_several_lengths(op, parts, size, scale):
    """Each part gives every row its own number of tokens: outputs, states and gradients."""
    problem = PROBLEMS[op].make_problem(3, 34, 2, 4, size, scale=scale)
    state, counts = None, torch.tensor(parts)
    begun = counts.cumsum(0) - counts
    outputs = [[], [], []]
    for lengths, first in zip(counts, begun, strict=True):
        # What is behind a row's tokens here comes again in its next part.
        index = first[:, None] + torch.arange(11)
        part = {n: states.take(x, index) if n in TOKENS else x for n, x in problem.items()}
        o, state = OPS[op](
            **part, mini_batch_size=size, state=state, lengths=lengths, return_state=True
        )
        for row, length in enumerate(lengths.tolist()):
            outputs[row].append(o[row, :length])
    got, wanted = 0, 0
    generator = torch.Generator().manual_seed(1)
    for row, length in enumerate(counts.sum(0).tolist()):
        if not length:
            continue
        own = {n: x[row : row + 1, :length] if n in TOKENS else x for n, x in problem.items()}
        o, last = OPS[op](**own, mini_batch_size=size, return_state=True)
        ours = torch.cat(outputs[row])
        assert_close(ours, o[0], 1e-10)
        assert state.position[row] == last.position
        for name, x, y in zip(state._fields, state[:-1], last[:-1], strict=False):
            assert_close(x[row], y[0], 1e-10, name)
        weights = torch.randn(o.shape, dtype=o.dtype, generator=generator)[0]
        got = got + (ours * weights).sum() + state[0][row].sum()
        wanted = wanted + (o[0] * weights).sum() + last[0][0].sum()
    if isinstance(got, Tensor):
        leaves = list(problem.values())
        pairs = zip(
            torch.autograd.grad(got, leaves), torch.autograd.grad(wanted, leaves), strict=True
        )
        for name, (x, y) in zip(problem, pairs, strict=True):
            assert_close(x, y, 1e-9, name)


@pytest.mark.parametrize("op", OPS)
def test_lengths_that_do_not_fit(op):
    problem = {n: x.detach() for n, x in PROBLEMS[op].make_problem(2, 6, 2, 4, SIZE).items()}

    def refused(error, told, lengths, **options):
        with pytest.raises(error, match=told):
            OPS[op](**problem, mini_batch_size=SIZE, lengths=lengths, **options)

    refused(TypeError, "a tensor of int32 or int64, got list", [6, 6])
    for dtype in (torch.float32, torch.bool, torch.uint8):
        refused(TypeError, f"int32 or int64, got {dtype}", torch.ones(2, dtype=dtype))
    refused(ValueError, r"must have shape \[2\], got \[3\]", torch.tensor([1, 2, 3]))
    refused(ValueError, r"lengths must be in 0 … 6, got \[7, 1\]", torch.tensor([7, 1]))
    refused(ValueError, "lengths is on meta", torch.tensor([6, 1], device="meta"))
    refused(TypeError, "got torch.sparse_coo", torch.tensor([6, 1]).to_sparse())
    refused(ValueError, r"in 0 … 6, got \[7, 1\]", torch.tensor([7, 1]), reverse_heads=1)
    _, state = OPS[op](**problem, mini_batch_size=SIZE, return_state=True)
    state = state._replace(position=torch.tensor([1, 4]))
    refused(ValueError, r"state.position must be in 0 … 3, got", torch.tensor([6, 1]), state=state)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cut", [3, 8])
def test_states_are_moved_selected_detached_and_saved(op, cut, tmp_path):
    from safetensors.torch import load_file, save_file

    problem = PROBLEMS[op].make_problem(2, 11, 2, 4, SIZE)
    first = {n: x[:, :cut] if n in TOKENS else x for n, x in problem.items()}
    rest = {n: x[:, cut:].detach() if n in TOKENS else x.detach() for n, x in problem.items()}
    _, state = OPS[op](**first, mini_batch_size=SIZE, return_state=True)
    assert state.w.requires_grad if op == "ttt_linear" else state.w1.requires_grad
    state = state.detach()
    wanted = OPS[op](**rest, mini_batch_size=SIZE, state=state)
    assert not wanted.requires_grad
    save_file(state.tensors(), tmp_path / "state.safetensors")
    loaded = states.from_tensors(KINDS[op], load_file(tmp_path / "state.safetensors"))
    assert isinstance(loaded.position, int)
    assert torch.equal(OPS[op](**rest, mini_batch_size=SIZE, state=loaded), wanted)
    swapped = {n: x[[1, 0]] if n in TOKENS else x for n, x in rest.items()}
    got = OPS[op](**swapped, mini_batch_size=SIZE, state=state.select([1, 0]))
    assert_close(got, wanted[[1, 0]], 1e-12)
    assert state.to(torch.float32)[0].dtype == torch.float32
    with pytest.raises(ValueError, match="needs"):
        states.from_tensors(KINDS[op], {})
    with pytest.raises(ValueError, match="has no other"):
        states.from_tensors(KINDS[op], {**state.tensors(), "other": torch.ones(1)})


@pytest.mark.parametrize("op", OPS)
def test_states_that_are_not_one_batch(op):
    def state_of(op, **options):
        problem = PROBLEMS[op].make_problem(1, 5, 2, 4, SIZE)
        return OPS[op](**problem, mini_batch_size=SIZE, return_state=True, **options)[1]

    state, of_two_directions = state_of(op), state_of(op, reverse_heads=1)
    (other,) = OPS.keys() - {op}
    with pytest.raises(ValueError, match="at least one state, got none"):
        states.concatenate([])
    for parts in ((state, of_two_directions), (of_two_directions, state)):
        with pytest.raises(ValueError, match="states of one kind, got NoneType and Tensor"):
            states.concatenate(parts)
    with pytest.raises(ValueError, match="states of one kind, got LinearState and MLPState"):
        states.concatenate([state, state_of(other)])


@pytest.mark.parametrize("op", OPS)
def test_states_that_do_not_fit(op):
    problem = {n: x.detach() for n, x in PROBLEMS[op].make_problem(2, 6, 2, 4, SIZE).items()}
    call = OPS[op]
    _, state = call(**problem, mini_batch_size=SIZE, return_state=True)
    with pytest.raises(ValueError, match=r"reverse_heads=1 does not accept a state"):
        call(**problem, mini_batch_size=SIZE, state=state, reverse_heads=1)
    with pytest.raises(TypeError, match=f"must be a {KINDS[op].__name__}, got tuple"):
        call(**problem, mini_batch_size=SIZE, state=tuple(state))
    with pytest.raises(ValueError, match=r"must be in 0 … 1 with mini_batch_size=2, got 2"):
        call(**problem | _cut_scale(problem, 2), mini_batch_size=2, state=state)
    with pytest.raises(ValueError, match=r"start_w1? must have shape \[2, 2, 4, .*\[1, 2, 4"):
        call(**problem, mini_batch_size=SIZE, state=state.select([0]))
    for position in (2.0, True):
        with pytest.raises(TypeError, match=f"each sequence, got {position}"):
            call(**problem, mini_batch_size=SIZE, state=state._replace(position=position))
    field = state._fields[-2]
    with pytest.raises(ValueError, match=f"state.{field} is missing"):
        call(**problem, mini_batch_size=SIZE, state=state._replace(**{field: None}))
    _, both = call(**problem, mini_batch_size=SIZE, reverse_heads=1, return_state=True)
    assert both.position is None
    with pytest.raises(ValueError, match="scan in two directions cannot go on"):
        call(**problem, mini_batch_size=SIZE, state=both)
    with pytest.raises(ValueError, match="cpu"):
        call(**problem, mini_batch_size=SIZE, state=state, backend="cpu")  # float64


BAD = {
    "meta": (lambda x: x.to("meta"), ValueError, "is on meta, "),
    "complex": (lambda x: x.to(torch.complex64), TypeError, "got torch.complex64"),
    "int32": (lambda x: x.to(torch.int32), TypeError, "got torch.int32"),
    "sparse": (lambda x: x.to_sparse(), TypeError, "strided tensor, got torch.sparse_coo"),
    "list": (lambda x: x.tolist(), TypeError, "a tensor, got list"),
    "shape": (lambda x: x[:, :1], ValueError, "must have shape"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("length", [1, 6])  # tokens of one mini-batch, and of several
@pytest.mark.parametrize("op", OPS)
def test_every_tensor_of_a_state_is_checked(op, length, bad):
    """In float32, which the kernels support: they read whatever lies at an address."""
    options = {"dtype": torch.float32}
    made = PROBLEMS[op].make_problem(2, 6, 2, 16, SIZE, **options)
    problem = {n: x.detach() for n, x in made.items()}
    _, state = OPS[op](**problem, mini_batch_size=SIZE, return_state=True)
    following = {n: x[:, :length] if n in TOKENS else x for n, x in problem.items()}
    change, error, told = BAD[bad]
    for field in [name for name in state._fields if name.startswith(("start_", "sum_"))]:
        wrong = state._replace(**{field: change(getattr(state, field))})
        with pytest.raises(error, match=f"{op}: state.{field} .*{told}"):
            OPS[op](**following, mini_batch_size=SIZE, state=wrong)


@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_every_position_of_a_state_is_checked(op, grad, length):
    made = PROBLEMS[op].make_problem(2, 6, 2, 4, SIZE)
    problem = {n: x.detach().requires_grad_(grad) for n, x in made.items()}
    _, state = OPS[op](**problem, mini_batch_size=SIZE, return_state=True)
    following = {n: x[:, :length] if n in TOKENS else x for n, x in problem.items()}

    def refused(error, told, position):
        with pytest.raises(error, match=rf"{op}: state.position .*{told}"):
            OPS[op](**following, mini_batch_size=SIZE, state=state._replace(position=position))

    refused(TypeError, "int32 or int64, got torch.float32", torch.zeros(2))
    refused(TypeError, "got torch.sparse_coo", torch.ones(2, dtype=torch.int64).to_sparse())
    refused(TypeError, r"each sequence, got \[1, 2\]", [1, 2])
    refused(ValueError, r"shape \[2\], got \[3\]", torch.tensor([1, 2, 3]))
    refused(ValueError, "is on meta, the tokens on cpu", torch.tensor([1, 2], device="meta"))
    refused(ValueError, r"in 0 … 3, got \[1, 4\]", torch.tensor([1, 4]))
    refused(ValueError, r"in 0 … 3, got \[-1, 2\]", torch.tensor([-1, 2]))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("lengths", [None, torch.tensor([3, 0])])
def test_a_state_does_not_change_with_the_parameters(op, lengths):
    """Before the first mini-batch is complete it is the initial state, and must not be its view."""
    problem = PROBLEMS[op].make_problem(2, 3, 2, 4, SIZE)
    initial = [x for n, x in problem.items() if n not in TOKENS]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            options = {"mini_batch_size": SIZE, "lengths": lengths}
            _, state = OPS[op](**problem, **options, return_state=True)
        state = state.detach() if grad else state
        before = state.tensors()
        with torch.no_grad():
            for x in initial:
                x.add_(1.0)
        for name, x in state.tensors().items():
            assert torch.equal(x, before[name]), name


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("length", [3, 4, 6])
def test_no_sequences_have_a_state(op, length):
    problem = PROBLEMS[op].make_problem(1, length, 2, 4, SIZE, dtype=torch.float32)
    empty = {n: x[:0].detach() if n in TOKENS else x.detach() for n, x in problem.items()}
    o, state = OPS[op](**empty, mini_batch_size=SIZE, return_state=True)
    assert o.shape == (0, length, 2, 4)
    assert state.select([])[0].shape == state[0].shape
    o, _ = OPS[op](**empty, mini_batch_size=SIZE, state=state, return_state=True)
    assert o.shape == (0, length, 2, 4)


def _cut_scale(problem: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    return {"position_scale": problem["position_scale"][..., :size].contiguous()}


@pytest.mark.parametrize("op", OPS)
def test_autocast_and_low_precision(op):
    """Parts round where the whole rounds; the state stays float32."""
    problem = PROBLEMS[op].make_problem(1, 23, 2, 16, SIZE, dtype=torch.float32)
    problem = {n: x.detach() for n, x in problem.items()}
    with torch.autocast("cpu", torch.bfloat16):
        o, state, _ = in_parts(op, problem, [6, 13], mini_batch_size=SIZE)
        whole = OPS[op](**problem, mini_batch_size=SIZE)
    assert o.dtype == whole.dtype == torch.bfloat16
    assert state[0].dtype == torch.float32
    assert_close(o, whole, 2e-2)


@pytest.mark.parametrize("op", OPS)
def test_shapes_on_meta(op):
    """Where nothing is computed, states have their shapes, too."""
    problem = PROBLEMS[op].make_problem(2, 11, 2, 16, SIZE, dtype=torch.float32)
    real, meta = None, None
    for start, stop in ((0, 6), (6, 11)):
        part = {n: x.detach()[:, start:stop] if n in TOKENS else x for n, x in problem.items()}
        own = {n: x.detach().to("meta") for n, x in part.items()}
        wanted, real = OPS[op](**part, mini_batch_size=SIZE, state=real, return_state=True)
        o, meta = OPS[op](**own, mini_batch_size=SIZE, state=meta, return_state=True)
        assert o.is_meta
        assert o.shape == wanted.shape
        assert [x.shape for x in meta[:-1]] == [x.shape for x in real[:-1]]
        assert meta.position == real.position


@pytest.mark.parametrize("op", OPS)
def test_compiled_steps(op):
    """A step of one token compiles whole, for each place in the mini-batch or for all at once."""
    problem = PROBLEMS[op].make_problem(2, 10, 2, 16, SIZE, dtype=torch.float32)
    problem = {n: x.detach() for n, x in problem.items()}
    torch._dynamo.reset()  # an int is a constant of what is compiled: a version for each place
    step = torch.compile(OPS[op], fullgraph=True, backend="eager")
    first = {n: x[:, :3] if n in TOKENS else x for n, x in problem.items()}
    _, state = OPS[op](**first, mini_batch_size=SIZE, return_state=True)
    wanted = OPS[op](**problem, mini_batch_size=SIZE)
    for own in (state, state._replace(position=torch.tensor([3, 3]))):
        for token in range(3, 6):
            part = {n: x[:, token : token + 1] if n in TOKENS else x for n, x in problem.items()}
            o, own = step(**part, mini_batch_size=SIZE, state=own, return_state=True)
            assert_close(o, wanted[:, token : token + 1], 1e-5)
