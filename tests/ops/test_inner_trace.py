"""Inner losses and gradient norms of the learner ops against a loop over tokens with autograd."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ttt_linear_problems
import ttt_mlp_problems
from tolerances import assert_close
from vision_ttt.ops import inner_trace
from vision_ttt.ops.inner_trace import InnerTrace
from vision_ttt.ops.ttt_linear import ttt_linear, ttt_linear_losses, ttt_linear_trace
from vision_ttt.ops.ttt_mlp import ttt_mlp, ttt_mlp_losses, ttt_mlp_trace

KINDS = {
    "linear": (ttt_linear_problems, ("w0", "b0"), ttt_linear, ttt_linear_trace, ttt_linear_losses),
    "mlp": (ttt_mlp_problems, ("w1", "b1", "w2", "b2"), ttt_mlp, ttt_mlp_trace, ttt_mlp_losses),
}
LENGTH, SIZE, HEADS = 10, 4, 2  # the last mini-batch has two tokens


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def problem_of(kind: str, **options) -> dict[str, Tensor]:
    problem = KINDS[kind][0].make_problem(1, LENGTH, HEADS, 4, SIZE, **options)
    return {name: x.detach() for name, x in problem.items()}


def own_loss(state: tuple[Tensor, ...], k: Tensor, v: Tensor, norm: tuple | None) -> Tensor:
    """½‖f(k) − v‖² of one token and head: k, v [d]."""
    z = k @ state[0] + state[1]
    if len(state) == 4:
        z = F.gelu(z, approximate="tanh") @ state[2] + state[3]
    if norm is not None:
        z = k + F.layer_norm(z, z.shape, *norm, 1e-6)
    return 0.5 * (z - v).square().sum()


def naive_trace(kind: str, problem: dict[str, Tensor], reverse_heads: int) -> InnerTrace:
    """Token after token: one gradient by autograd each, and the sums of Eq. 6 as they stand."""
    names = KINDS[kind][1]
    found = InnerTrace(*torch.zeros(5, 1, LENGTH, HEADS, dtype=torch.float64))
    for head in range(HEADS):
        order = range(LENGTH) if head < HEADS - reverse_heads else range(LENGTH)[::-1]
        norm = None
        if "ln_weight" in problem:
            norm = problem["ln_weight"][head], problem["ln_bias"][head]
        first = before = tuple(problem[name][head] for name in names)
        for place, t in enumerate(order):
            k, v, eta = (problem[name][0, t, head] for name in ("k", "v", "eta"))
            if place % SIZE == 0:
                sums = tuple(torch.zeros_like(x) for x in before)
            losses = []
            for state in (first, before):
                gradient, loss = torch.func.grad_and_value(own_loss)(state, k, v, norm)
                weights = torch.cat([g.flatten() for g in gradient[::2]])  # without biases
                losses = [loss, weights.norm(), *losses]
            sums = tuple(s + eta * g for s, g in zip(sums, gradient, strict=True))
            p = problem["position_scale"][head, place % SIZE]
            now = tuple(x - p * s for x, s in zip(before, sums, strict=True))
            losses.append(own_loss(now, k, v, norm))
            for record, value in zip(found, losses, strict=True):
                record[0, t, head] = value
            if place % SIZE == SIZE - 1:
                before = now
    return found


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("reverse_heads", [0, 1])
def test_traces_are_those_of_a_loop_over_tokens(kind, norm, reverse_heads):
    problem = problem_of(kind, norm=norm)
    options = {"mini_batch_size": SIZE, "reverse_heads": reverse_heads}
    trace = KINDS[kind][3](**problem, **options)
    wanted = naive_trace(kind, problem, reverse_heads)
    for name in InnerTrace._fields:
        assert_close(getattr(trace, name), getattr(wanted, name), 1e-10, name)


def test_updated_loss_is_the_op_s_own_prediction(kind):
    problem = problem_of(kind)
    options = {"mini_batch_size": SIZE, "reverse_heads": 1}
    trace = KINDS[kind][3](**problem, **options)
    o = KINDS[kind][2](**{**problem, "q": problem["k"]}, **options, backend="reference")
    assert_close(trace.updated_loss, 0.5 * (o - problem["v"]).square().sum(-1), 1e-10)


def test_losses_at_one_state(kind, monkeypatch):
    """In pieces of the tokens, for images with states of their own."""
    monkeypatch.setattr(inner_trace, "TOKENS_AT_ONCE", 3)
    problem = problem_of(kind, state_per_image=True)
    _, names, _, trace, losses = KINDS[kind]
    given = {name: problem[name] for name in ("k", "v", *names, "ln_weight", "ln_bias")}
    found, whole = losses(**given), trace(**problem, mini_batch_size=SIZE)
    assert_close(found.loss, whole.initial_loss, 1e-12)
    assert_close(found.gradient_norm, whole.initial_gradient_norm, 1e-12)


def test_half_precision_is_traced_in_float32(kind):
    problem = problem_of(kind)
    _, _, _, trace, _ = KINDS[kind]
    rounded = {name: x.bfloat16() if name in "qkv" else x.float() for name, x in problem.items()}
    got = trace(**rounded, mini_batch_size=SIZE, reverse_heads=1)
    exact = {name: x.double() for name, x in rounded.items()}
    wanted = trace(**exact, mini_batch_size=SIZE, reverse_heads=1)
    for x, y in zip(got, wanted, strict=True):
        assert x.dtype == torch.float32
        assert_close(x, y, 1e-4)


def test_traces_of_tensors_without_content(kind):
    """Their device has no autocast to switch off."""
    problem = {name: x.to("meta") for name, x in problem_of(kind).items()}
    trace = KINDS[kind][3](**problem, mini_batch_size=SIZE)
    assert {x.shape for x in trace} == {(1, LENGTH, HEADS)}


def test_traces_refuse(kind):
    problem = problem_of(kind)
    _, names, _, trace, losses = KINDS[kind]
    with pytest.raises(ValueError, match=rf"ttt_{kind}: v must have shape \[1, 10, 2, 4\]"):
        trace(**{**problem, "v": problem["v"][:, :5]})
    given = {name: problem[name] for name in ("k", "v", *names)}
    with pytest.raises(ValueError, match=rf"ttt_{kind}_losses: v must have shape"):
        losses(**{**given, "v": problem["v"][:, :5]})
    with pytest.raises(ValueError, match="give both ln_weight and ln_bias, or neither"):
        losses(**given, ln_weight=problem["ln_weight"])
