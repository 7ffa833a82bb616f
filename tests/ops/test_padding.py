"""Padding behind the tokens of the ops that take lengths: whatever it holds changes nothing."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

import ttt_linear_problems
import ttt_mlp_problems
from padded_calls import ANY, absent, check_padding
from tolerances import assert_close
from vision_ttt.ops import selective_scan, ttt_linear, ttt_mlp
from vision_ttt.ops._table import TABLE

OPS = {"ttt_linear": ttt_linear, "ttt_mlp": ttt_mlp}
PROBLEMS = {"ttt_linear": ttt_linear_problems, "ttt_mlp": ttt_mlp_problems}
CASES = [(op, backend) for op, problems in PROBLEMS.items() for backend in problems.BACKENDS]
TOKENS = ("q", "k", "v", "eta")
SIZE, LENGTH = 4, 11
LENGTHS = [0, 3, 11, 6]


def check(op, value, *, dtype=torch.float32, state=None, return_state=True, **options):
    problem = PROBLEMS[op].make_problem(4, LENGTH, 2, 16, SIZE, dtype=dtype)
    tokens = {name: x for name, x in problem.items() if name in TOKENS}
    others = {name: x for name, x in problem.items() if name not in TOKENS}
    options |= {"mini_batch_size": SIZE, "lengths": torch.tensor(LENGTHS), "state": state}

    def call(**tokens):
        o = OPS[op](**tokens, **others, **options, return_state=return_state)
        return [o[0], *(x for x in o[1] if torch.is_tensor(x))] if return_state else [o]

    leaves = list(others.values())
    if state is not None:
        leaves += [x for x in state[:-1] if x.requires_grad]
    check_padding(call, tokens, leaves, absent(LENGTHS, LENGTH), value)


@ANY
@pytest.mark.parametrize(("op", "backend"), CASES)
@pytest.mark.parametrize("return_state", [False, True])
def test_padding_changes_nothing(op, backend, return_state, value):
    check(op, value, backend=backend, return_state=return_state)


@ANY
@pytest.mark.parametrize(("op", "backend"), CASES)
@pytest.mark.parametrize("return_state", [False, True])
def test_padding_of_heads_that_scan_from_the_last_token(op, backend, return_state, value):
    check(op, value, backend=backend, return_state=return_state, reverse_heads=1)


@pytest.mark.parametrize("op", OPS)
def test_both_directions_of_a_padded_row_are_what_they_are_alone(op):
    problem = PROBLEMS[op].make_problem(4, LENGTH, 3, 16, SIZE, dtype=torch.float64)
    options = {"mini_batch_size": SIZE, "reverse_heads": 1, "return_state": True}
    o, state = OPS[op](**problem, **options, lengths=torch.tensor(LENGTHS))
    for row, length in enumerate(LENGTHS):
        if length:
            alone = {
                name: x[row : row + 1, :length] if name in TOKENS else x
                for name, x in problem.items()
            }
            wanted, last = OPS[op](**alone, **options)
            torch.testing.assert_close(o[row, :length], wanted[0])
            for x, y in zip(state, last, strict=True):
                assert (x is None) == (y is None)
                if x is not None:
                    torch.testing.assert_close(x[row], y[0])


SCANS = {  # the options, and names of further arguments
    "softplus": ({"delta_softplus": True}, ("D", "z", "delta_bias")),
    "bias": ({}, ("delta_bias",)),
    "neither": ({}, ()),
}


def make_scan(dtype, others, groups=2):
    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    tokens = {name: random(4, LENGTH, 32) for name in ("u", "delta", "z")}
    tokens |= {name: random(4, LENGTH, groups, 16) for name in ("B", "C")}
    tokens["delta"] = tokens["delta"].abs() / 4
    rest = {"A": -random(32, 16).abs(), "D": random(32), "delta_bias": random(32).abs() / 4}
    rest["initial_state"] = random(4, 32, 16)
    given = {**tokens, **rest}
    left = {"D", "z", "delta_bias"} - set(others)
    given = {name: x.requires_grad_() for name, x in given.items() if name not in left}
    return given, [name for name in tokens if name in given]


@ANY
@pytest.mark.parametrize("case", SCANS)
@pytest.mark.parametrize("backend", ["cpu", "dual", "reference"])
def test_padding_of_a_selective_scan(backend, case, value):
    options, others = SCANS[case]
    given, names = make_scan(torch.float32, others)
    tokens = {name: given.pop(name) for name in names}

    def call(**tokens):
        return selective_scan(
            *(tokens["u"], tokens["delta"], given["A"], tokens["B"], tokens["C"]),
            given.get("D"),
            tokens.get("z"),
            given.get("delta_bias"),
            initial_state=given["initial_state"],
            lengths=torch.tensor(LENGTHS),
            reverse_channels=16,
            return_state=True,
            backend=backend,
            **options,
        )

    check_padding(call, tokens, list(given.values()), absent(LENGTHS, LENGTH), value)


@pytest.mark.parametrize("case", SCANS)
def test_a_padded_row_of_a_selective_scan_is_what_it_is_alone(case):
    """Its gradients, too: no step at the padding may leave one to the bias."""
    options, others = SCANS[case]
    given, names = make_scan(torch.float64, others)
    options = {**options, "reverse_channels": 16, "return_state": True}
    y, state = selective_scan(**given, **options, lengths=torch.tensor(LENGTHS))
    weight = torch.randn(4, LENGTH, 32, dtype=torch.float64)
    loss, expected = (y * weight).sum() + state.square().sum(), 0
    for row, length in enumerate(LENGTHS):
        alone = {
            name: x[row : row + 1, :length] if name in names else x for name, x in given.items()
        }
        alone["initial_state"] = given["initial_state"][row : row + 1]
        if not length:
            expected = expected + alone["initial_state"].square().sum()
            continue
        each, last = selective_scan(**alone, **options)
        torch.testing.assert_close(y[row, :length], each[0])
        torch.testing.assert_close(state[row], last[0])
        expected = expected + (each[0] * weight[row, :length]).sum() + last.square().sum()
    leaves = list(given.values())
    torch.testing.assert_close(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves)
    )


@pytest.mark.parametrize("autocast", [False, True])
def test_padding_of_a_selective_scan_adds_up_no_rounded_steps(autocast):
    """A bias that bfloat16 rounds: a step of the difference at each of many tokens is seen."""
    given, _ = make_scan(torch.float32, ("delta_bias",))
    tokens = {
        name: given[name].detach().repeat(1, 50, *[1] * (given[name].ndim - 2))
        for name in ("u", "delta", "B", "C")
    }
    others = {name: x.detach() for name, x in given.items() if name not in tokens}
    if not autocast:
        tokens = {name: x.bfloat16() for name, x in tokens.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        _, state = selective_scan(
            **tokens, **others, lengths=torch.full((4,), 3), return_state=True
        )
        alone = {name: x[:, :3] for name, x in tokens.items()}
        _, wanted = selective_scan(**alone, **others, return_state=True)
    assert_close(state, wanted, 1e-2)


def test_lengths_of_a_selective_scan_that_do_not_fit():
    given, _ = make_scan(torch.float32, ())
    with pytest.raises(ValueError, match=r"selective_scan: lengths must be in 0 … 11, got \[12"):
        selective_scan(**given, lengths=torch.tensor([12, 0, 0, 0]))
    with pytest.raises(TypeError, match="int32 or int64, got list"):
        selective_scan(**given, lengths=[1, 2, 3, 4])
    given["B"] = given["B"][:, :5]
    with pytest.raises(ValueError, match="B must have shape"):
        selective_scan(**given, lengths=torch.tensor([1, 0, 0, 0]))


@ANY
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("position", [0, 3, torch.tensor([1, 0, 2, 3])])
def test_padding_behind_a_state(op, position, value):
    """At one place of the mini-batch, or at each sequence's own."""
    problem = PROBLEMS[op].make_problem(4, 3, 2, 16, SIZE, dtype=torch.float32)
    _, state = OPS[op](**problem, mini_batch_size=SIZE, return_state=True)
    state = type(state)(*(x.detach().requires_grad_() for x in state[:-1]), position)
    check(op, value, state=state)
    check(op, value, state=state, return_state=False)


@ANY
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_padding_in_other_precisions(op, dtype, value):
    check(op, value, dtype=dtype)


@pytest.mark.parametrize("op", OPS)
def test_padding_without_gradients(op):
    """Parts of mini-batches run in the kernels."""
    problem = PROBLEMS[op].make_problem(4, LENGTH, 2, 16, SIZE, dtype=torch.float32)
    problem = {name: x.detach() for name, x in problem.items()}
    options = {"mini_batch_size": SIZE, "lengths": torch.tensor(LENGTHS), "return_state": True}
    found = []
    for value in (0.0, float("nan")):
        for name in TOKENS:
            problem[name][absent(LENGTHS, LENGTH)] = value
        found.append(OPS[op](**problem, **options))
    (o, state), (wanted, exact) = found
    for x, y in zip((o, *state), (wanted, *exact), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_mini_batches_beyond_all_tokens_need_no_memory(op, dtype):
    """Their size counts in no cost: of a first call, and of those that go on."""
    problem = PROBLEMS[op].make_problem(4, LENGTH, 2, 16, SIZE, scale=None)
    lengths = torch.tensor(LENGTHS, dtype=dtype)

    def call(**options):
        _, state = OPS[op](**problem, **options, lengths=lengths, return_state=True)
        o, state = OPS[op](**problem, **options, lengths=lengths, state=state, return_state=True)
        return [o, OPS[op](**problem, **options, state=state), *state]

    for got, wanted in zip(call(mini_batch_size=2**40), call(mini_batch_size=64), strict=True):
        torch.testing.assert_close(got, wanted)
    options = {**problem, "return_state": True}
    o, _ = OPS[op](**options, mini_batch_size=2**40)
    torch.testing.assert_close(o, OPS[op](**options, mini_batch_size=64)[0])


@pytest.mark.parametrize("op", OPS)
def test_padding_needs_no_eps(op):
    """Neither lengths nor short mini-batches may meet a norm's 0 / 0 at the initial bias of 0."""
    problem = PROBLEMS[op].make_problem(2, 3, 2, 16, SIZE, dtype=torch.float32)
    for name in ("b0", "b1", "b2"):
        if name in problem:
            problem[name] = torch.zeros_like(problem[name]).requires_grad_()
    leaves = list(problem.values())
    options = {"mini_batch_size": SIZE, "eps": 0.0}
    o = OPS[op](**problem, **options, lengths=torch.tensor([2, 0]))
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(o.sum(), leaves))
    inputs = TABLE[op].inputs(**{**problem, "mini_batch_size": 4, "reverse_heads": 0, "eps": 0.0})
    got, *_ = TABLE[op].exported(inputs)
    torch.testing.assert_close(got, OPS[op](**problem, **options))


@pytest.mark.parametrize("reverse_heads", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_padding_in_a_graph(reverse_heads):
    torch._dynamo.reset()
    problem = ttt_linear_problems.make_problem(4, LENGTH, 2, 16, SIZE, dtype=torch.float32)
    tokens = {name: x for name, x in problem.items() if name in TOKENS}
    others = {name: x for name, x in problem.items() if name not in TOKENS}
    compiled = torch.compile(ttt_linear, fullgraph=True, backend="aot_eager")

    def call(**tokens):
        options = {"mini_batch_size": SIZE, "lengths": torch.tensor(LENGTHS)}
        options["reverse_heads"] = reverse_heads
        o, state = compiled(**tokens, **others, **options, return_state=True)
        return [o, *(x for x in state if torch.is_tensor(x))]

    check_padding(call, tokens, list(others.values()), absent(LENGTHS, LENGTH), float("nan"))


@pytest.mark.parametrize("op", OPS)
def test_fake_tensors_have_no_lengths_or_positions_to_check(op):
    problem = PROBLEMS[op].make_problem(4, LENGTH, 2, 16, SIZE, dtype=torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        options = {"mini_batch_size": SIZE, "return_state": True}
        lengths = torch.full((4,), 3)
        _, state = OPS[op](**problem, **options, lengths=lengths)
        o, _ = OPS[op](**problem, **options, state=state)
        assert o.shape == problem["q"].shape


def test_a_selective_scan_of_fake_tensors_has_no_lengths_to_check():
    given, _ = make_scan(torch.float32, ())
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert selective_scan(**given, lengths=torch.full((4,), 3)).shape == given["u"].shape


@pytest.mark.parametrize("op", OPS)
def test_inputs_are_checked_ahead_of_the_padding(op):
    problem = PROBLEMS[op].make_problem(2, 6, 2, 4, SIZE)
    problem["k"] = problem["k"][:, :5]
    with pytest.raises(ValueError, match=r"k must have shape"):
        OPS[op](**problem, mini_batch_size=SIZE, lengths=torch.tensor([6, 1]))
