"""The closed-form gradient of the inner loss, and the trace of a run, against autograd."""

import pytest
import torch

from tolerances import assert_close
from ttt_linear_problems import make_problem
from vision_ttt.ops.ttt_linear import ttt_linear, ttt_linear_trace
from vision_ttt.ops.ttt_linear.inner_model import InnerNorm, inner_gradient, inner_output


@pytest.mark.parametrize("with_norm", [True, False])
def test_inner_gradient_is_the_gradient_of_the_loss(with_norm):
    z, k, v = torch.randn(3, 2, 3, 5, 8, dtype=torch.float64)
    weight, bias = torch.randn(2, 3, 1, 8, dtype=torch.float64)
    norm = InnerNorm(weight, bias, 1e-6) if with_norm else None
    z.requires_grad_()
    loss = 0.5 * (inner_output(k, z, norm) - v).square().sum()
    (wanted,) = torch.autograd.grad(loss, z)
    assert_close(inner_gradient(z, k, v, norm), wanted, 1e-12)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("reverse_heads", [0, 1])
def test_trace_is_loss_and_gradient_at_the_state_before_the_mini_batch(norm, reverse_heads):
    """Token by token: the state by the op on the tokens before, the gradient by autograd."""
    size, length, heads = 4, 10, 2
    problem = {n: x.detach() for n, x in make_problem(1, length, heads, 8, size, norm=norm).items()}
    options = {"mini_batch_size": size, "reverse_heads": reverse_heads}
    trace = ttt_linear_trace(**problem, **options)
    for head in range(heads):
        reverse = head >= heads - reverse_heads
        order = list(range(length))[:: -1 if reverse else 1]
        for step, t in enumerate(order):
            seen = order[: step // size * size]
            state = problem["w0"][head], problem["b0"][head]
            if seen:
                own = {
                    name: x[:, seen, head : head + 1]
                    if name in ("q", "k", "v", "eta")
                    else x[head : head + 1]
                    for name, x in problem.items()
                }
                _, (w, b, *_) = ttt_linear(**own, mini_batch_size=size, return_state=True)
                state = w[0, 0], b[0, 0]
            w = state[0].clone().requires_grad_()
            k, v = problem["k"][0, t, head], problem["v"][0, t, head]

            def loss(w, b, k=k, v=v, head=head):
                f = k @ w + b
                if norm:
                    gain, offset = problem["ln_weight"][head], problem["ln_bias"][head]
                    f = k + torch.nn.functional.layer_norm(f, f.shape, gain, offset, 1e-6)
                return 0.5 * (f - v).square().sum()

            value = loss(w, state[1])
            (gradient,) = torch.autograd.grad(value, w)
            assert_close(trace.loss[0, t, head], value, 1e-10)
            assert_close(trace.gradient_norm[0, t, head], gradient.norm(), 1e-10)
            w = problem["w0"][head].clone().requires_grad_()
            value = loss(w, problem["b0"][head])
            (gradient,) = torch.autograd.grad(value, w)
            assert_close(trace.initial_loss[0, t, head], value, 1e-10)
            assert_close(trace.initial_gradient_norm[0, t, head], gradient.norm(), 1e-10)
