"""The theorems of the papers, and what follows from the definition, as tests."""

import pytest
import torch
import torch.nn.functional as F

from tolerances import assert_close
from ttt_linear_problems import make_problem, solve
from vision_ttt.ops import ttt_linear

BACKENDS = ["reference", "dual"]


def views(length=23, heads=2, dim=8):
    problem = make_problem(2, length, heads, dim, norm=False, scale=None)
    return tuple(problem[name].detach() for name in "qkv")


def zero_state(q):
    _, _, heads, dim = q.shape
    return q.new_zeros(heads, dim, dim), q.new_zeros(heads, dim)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_gradient_descent_is_linear_attention(backend):
    """Theorem 1 of both papers: b ≥ T, W₀ = 0, linear f, their η = ½, which is eta = 1."""
    q, k, v = views()
    w0, b0 = zero_state(q)
    eta = q.new_ones(q.shape[:3])
    # The theorem's model has no bias. Ours learns one, whose share Σ_{s≤t} v_s is known.
    o = ttt_linear(q, k, v, eta, w0, b0, mini_batch_size=len(q[0]), backend=backend)
    scores = torch.einsum("bthd,bshd->bhts", q, k).tril()
    linear_attention = torch.einsum("bhts,bshd->bthd", scores, v)
    assert_close(o, linear_attention + v.cumsum(1), 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_online_gradient_descent_is_the_delta_rule(backend):
    """Theorem 2 of Vision-TTT: b = 1 gives W_t = W_{t-1} - k_tᵀ(k_t W_{t-1} - v_t)."""
    q, k, v = views()
    # A constant 1 appended to keys and queries absorbs the bias into W: the recursion below runs on
    # [k, 1], and the op's W and b are the two parts of its state.
    w0, b0 = zero_state(q)
    eta = q.new_ones(q.shape[:3])
    o, (w, b, *_) = ttt_linear(
        q, k, v, eta, w0, b0, mini_batch_size=1, backend=backend, return_state=True
    )
    one = q.new_ones(*q.shape[:3], 1)
    k1, q1 = torch.cat([k, one], -1), torch.cat([q, one], -1)
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3] + 1, q.shape[3])  # [B, H, d + 1, d]
    outputs = []
    for t in range(q.shape[1]):
        error = torch.einsum("bhi,bhij->bhj", k1[:, t], state) - v[:, t]
        state = state - torch.einsum("bhi,bhj->bhij", k1[:, t], error)
        outputs.append(torch.einsum("bhi,bhij->bhj", q1[:, t], state))
    assert_close(o, torch.stack(outputs, 1), 1e-10)
    assert_close(w, state[:, :, :-1], 1e-10)
    assert_close(b, state[:, :, -1], 1e-10)


def test_nadaraya_watson_learner_is_softmax_attention():
    """Theorem 2 of the TTT paper: the learner that predicts, for a query, the constant c of least
    kernel-weighted loss Σ_s κ(q, k_s) ‖c - v_s‖² over the tokens so far, κ(q, k) = exp(q·k / √d),
    is causal softmax attention. The minimiser is found as a least-squares problem."""
    q, k, v = (x.transpose(1, 2) for x in views(length=9))  # [B, H, T, d]
    attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    kernel = torch.exp(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5)
    for t in range(q.shape[2]):
        root = kernel[..., t, : t + 1, None].sqrt()  # [B, H, t + 1, 1]
        constant = torch.linalg.lstsq(root, root * v[..., : t + 1, :]).solution  # [B, H, 1, d]
        assert_close(constant.squeeze(-2), attention[..., t, :], 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [16, 21])
def test_back_direction_is_forth_on_a_flipped_sequence(backend, length):
    problem = make_problem(2, length, 3, 8, 4)
    flipped = {
        name: (x.detach().flip(1) if name in ("q", "k", "v", "eta") else x.detach())
        for name, x in problem.items()
    }
    flipped = {name: x.requires_grad_() for name, x in flipped.items()}
    back, state = ttt_linear(
        **problem, mini_batch_size=4, reverse_heads=3, backend=backend, return_state=True
    )
    forth, state_forth = ttt_linear(
        **flipped, mini_batch_size=4, backend=backend, return_state=True
    )
    assert_close(back, forth.flip(1), 1e-12)
    assert_close(state[0], state_forth[0], 1e-12)
    back.square().sum().backward()
    forth.square().sum().backward()
    for name in problem:
        gradient = flipped[name].grad
        gradient = gradient.flip(1) if name in ("q", "k", "v", "eta") else gradient
        assert_close(problem[name].grad, gradient, 1e-11, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_directions_in_one_call_are_two_calls(backend):
    problem = make_problem(2, 21, 4, 8, 4)
    both = ttt_linear(**problem, mini_batch_size=4, reverse_heads=2, backend=backend)

    def half(pick):
        heads_at = {"q": 2, "k": 2, "v": 2, "eta": 2}
        return {
            name: x.movedim(heads_at.get(name, 0), 0)[pick].movedim(0, heads_at.get(name, 0))
            for name, x in problem.items()
        }

    forth = ttt_linear(**half(slice(0, 2)), mini_batch_size=4, backend=backend)
    back = ttt_linear(**half(slice(2, 4)), mini_batch_size=4, reverse_heads=2, backend=backend)
    assert_close(both, torch.cat([forth, back], dim=2), 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", [True, False])
def test_output_does_not_depend_on_padding(backend, norm):
    """What follows a sequence changes none of its outputs, short last mini-batch or not."""
    problem = {n: x.detach() for n, x in make_problem(1, 19, norm=norm).items()}
    o = ttt_linear(**problem, mini_batch_size=4, backend=backend)
    for padding in (1, 5, 13):
        padded = dict(problem)
        for name in ("q", "k", "v", "eta"):
            x = problem[name]
            padded[name] = torch.cat([x, x.new_full((1, padding, *x.shape[2:]), 7.0)], dim=1)
        longer = ttt_linear(**padded, mini_batch_size=4, backend=backend)
        assert_close(longer[:, :19], o, 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mini_batch_size", [1, 4, 16])
def test_no_token_depends_on_a_later_one(backend, mini_batch_size):
    """By gradient: ∂o_t/∂(k, v, eta)_s = 0 for s after t in scan order, and not before."""
    length, heads, t = 11, 2, 6
    problem = make_problem(1, length, heads, 4, mini_batch_size)
    o = ttt_linear(**problem, mini_batch_size=mini_batch_size, reverse_heads=1, backend=backend)
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
def test_zero_learning_rate_learns_nothing(backend):
    problem = make_problem(length=12)
    problem["eta"] = torch.zeros_like(problem["eta"])
    problem["eta"].requires_grad_()
    results = solve(problem, backend=backend, mini_batch_size=4)
    assert_close(results["w"], problem["w0"].expand_as(results["w"]), 1e-15)


@pytest.mark.parametrize("backend", BACKENDS)
def test_learning_lowers_the_loss_it_descends(backend):
    """One step on a batch lowers ½‖f(k) - v‖², norm and residual included."""
    problem = {n: x.detach() for n, x in make_problem(1, 16, 2, 8, 16, scale=None).items()}
    problem["q"] = problem["k"]
    before = ttt_linear(**problem | {"eta": 0 * problem["eta"]}, backend=backend)
    _, (w, b, *_) = ttt_linear(**problem, backend=backend, return_state=True)
    frozen = problem | {"eta": 0 * problem["eta"], "w0": w, "b0": b}
    after = ttt_linear(**frozen, backend=backend)
    target = problem["v"]
    assert (after - target).square().sum() < 0.95 * (before - target).square().sum()
