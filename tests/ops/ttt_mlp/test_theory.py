"""What follows from the definition of TTT-MLP, as tests."""

import pytest
import torch
import torch.nn.functional as F

from tolerances import assert_close
from ttt_mlp_problems import STATE, make_problem, solve
from vision_ttt.ops import ttt_mlp

BACKENDS = ["reference", "dual"]
SEQUENCES = ("q", "k", "v", "eta")


def transposed(x):
    """A weight as torch.nn.Linear holds it; a bias as it is."""
    return x.mT if x.ndim == 2 else x


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_full_batch_is_one_step_of_sgd(backend):
    """b ≥ T: the last token's inner model is a torch model after one torch.optim.SGD step."""
    torch.manual_seed(0)
    dim, length, rate = 4, 9, 0.1
    problem = make_problem(1, length, 1, dim, length, norm=False, scale=None)
    problem = {name: x.detach() for name, x in problem.items()}
    problem["eta"] = torch.full_like(problem["eta"], rate)
    model = torch.nn.Sequential(
        torch.nn.Linear(dim, 4 * dim),
        torch.nn.GELU(approximate="tanh"),
        torch.nn.Linear(4 * dim, dim),
    ).double()
    with torch.no_grad():
        for parameter, name in zip(model.parameters(), STATE, strict=True):
            parameter.copy_(transposed(problem[name][0]))
    loss = 0.5 * (model(problem["k"][0, :, 0]) - problem["v"][0, :, 0]).square().sum()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=rate).step()
    o, state = ttt_mlp(**problem, mini_batch_size=length, backend=backend, return_state=True)
    for parameter, x in zip(model.parameters(), state[:4], strict=True):
        assert_close(transposed(x[0, 0]), parameter, 1e-12)
    assert_close(o[0, -1, 0], model(problem["q"][0, -1, 0]), 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_learning_rate_is_the_initial_model(backend):
    problem = make_problem(length=12)
    problem["eta"] = torch.zeros_like(problem["eta"]).requires_grad_()
    results = solve(problem, backend=backend, mini_batch_size=4)
    for name in STATE:
        assert_close(results[name], problem[name].expand_as(results[name]), 1e-15)
    q = problem["q"].transpose(1, 2)
    w1, b1, w2, b2, gain, offset = (
        problem[name] if name in ("w1", "w2") else problem[name].unsqueeze(1)
        for name in (*STATE, "ln_weight", "ln_bias")
    )
    z = F.gelu(q @ w1 + b1, approximate="tanh") @ w2 + b2
    wanted = q + F.layer_norm(z, z.shape[-1:], eps=1e-6) * gain + offset
    assert_close(results["o"].transpose(1, 2), wanted, 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [16, 21])
def test_back_direction_is_forth_on_a_flipped_sequence(backend, length):
    problem = make_problem(2, length, 3, 4, 4)
    flipped = {
        name: (x.detach().flip(1) if name in SEQUENCES else x.detach()).requires_grad_()
        for name, x in problem.items()
    }
    back = solve(problem, mini_batch_size=4, reverse_heads=3, backend=backend)

    def flip_output(**arguments):
        o, state = ttt_mlp(**arguments)
        return o.flip(1), state

    forth = solve(flipped, function=flip_output, mini_batch_size=4, backend=backend)
    for name, wanted in back.items():
        own = forth[name].flip(1) if name.removeprefix("grad ") in SEQUENCES else forth[name]
        assert_close(own, wanted, 1e-11, name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", [True, False])
def test_output_does_not_depend_on_padding(backend, norm):
    """What follows a sequence changes none of its outputs, short last mini-batch or not."""
    problem = {n: x.detach() for n, x in make_problem(1, 19, norm=norm).items()}
    o = ttt_mlp(**problem, mini_batch_size=4, backend=backend)
    for padding in (1, 5, 13):
        padded = dict(problem)
        for name in SEQUENCES:
            x = problem[name]
            padded[name] = torch.cat([x, x.new_full((1, padding, *x.shape[2:]), 7.0)], dim=1)
        longer = ttt_mlp(**padded, mini_batch_size=4, backend=backend)
        assert_close(longer[:, :19], o, 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mini_batch_size", [1, 4, 16])
def test_no_token_depends_on_a_later_one(backend, mini_batch_size):
    """By gradient: ∂o_t/∂(k, v, eta)_s = 0 for s after t in scan order, and not before."""
    length, heads, t = 11, 2, 6
    problem = make_problem(1, length, heads, 4, mini_batch_size)
    o = ttt_mlp(**problem, mini_batch_size=mini_batch_size, reverse_heads=1, backend=backend)
    for head, later in ((0, slice(t + 1, None)), (1, slice(0, t))):
        weights = torch.randn(4, dtype=torch.float64)
        loss = (o[0, t, head] * weights).sum()
        gradients = torch.autograd.grad(
            loss, [problem[n] for n in ("k", "v", "eta")], retain_graph=True
        )
        for gradient in gradients:
            influence = gradient[0, :, head].abs().reshape(length, -1).amax(-1)
            assert (influence[later] == 0).all()
            influence[later] = 1
            assert (influence > 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_learning_lowers_the_loss_it_descends(backend):
    """One step on a batch lowers ½‖f(k) - v‖², norm and residual included."""
    problem = {n: x.detach() for n, x in make_problem(1, 16, 2, 8, 16, scale=None).items()}
    problem["q"] = problem["k"]
    still = {"eta": 0 * problem["eta"]}
    before = ttt_mlp(**problem | still, backend=backend)
    _, state = ttt_mlp(**problem, backend=backend, return_state=True)
    after = ttt_mlp(**problem | still | dict(zip(STATE, state[:4], strict=True)), backend=backend)
    target = problem["v"]
    assert (after - target).square().sum() < 0.95 * (before - target).square().sum()
