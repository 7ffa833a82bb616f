"""Calls that go past the dispatcher, and all those that must not."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from kernel_calls import record_kernel_calls
from vision_ttt.ops import (
    _contract,
    _dispatcher_bypass,
    _native,
    depthwise_conv2d,
    ttt_linear,
    ttt_mlp,
    use_backend,
)
from vision_ttt.ops._dispatcher_bypass import is_plain
from vision_ttt.ops._table import TABLE
from vision_ttt.ops.swiglu import swiglu

OP = TABLE["swiglu"]


@pytest.fixture
def dispatched(monkeypatch):
    """How often the custom op is called."""
    calls, original = [], OP.forward_op
    monkeypatch.setattr(OP, "forward_op", lambda *args: calls.append(1) or original(*args))
    return calls


def test_plain_calls_leave_the_dispatcher_out(dispatched):
    x = torch.randn(3, 64, requires_grad=True)
    with_gradient = swiglu(x)
    with torch.no_grad():
        assert torch.equal(swiglu(x), with_gradient)
    with torch.inference_mode():
        assert torch.equal(swiglu(x), with_gradient)
        assert torch.equal(swiglu(x.clone()), with_gradient)
    assert torch.equal(swiglu(x.detach()), with_gradient)
    assert torch.equal(swiglu(torch.nn.Parameter(x.detach(), requires_grad=False)), with_gradient)
    assert not dispatched


def test_a_pytorch_that_cannot_be_asked_dispatches_every_call(dispatched, monkeypatch):
    assert _dispatcher_bypass.HAS_QUERIES
    monkeypatch.setattr(_dispatcher_bypass, "HAS_QUERIES", False)
    swiglu(torch.randn(3, 64))
    assert len(dispatched) == 1


class Subclass(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


def negated_later() -> torch.Tensor:
    return torch.randn(3, 64, dtype=torch.complex64).conj().imag


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 64, device="meta"),
        lambda: torch.randn(3, 64).as_subclass(Subclass),
        negated_later,
        lambda: torch._efficientzerotensor(3, 64),
    ],
    ids=["meta", "subclass", "negated later", "zeros without memory"],
)
def test_tensors_that_the_dispatcher_must_see(make, dispatched):
    x = make()
    assert not is_plain((x,))
    y = swiglu(x)
    if x.is_meta:
        assert y.is_meta
        return
    assert len(dispatched) == 1
    plain = torch.empty(3, 64).copy_(x.detach())
    assert_close(y.detach().as_subclass(torch.Tensor), swiglu(plain))


def test_a_call_that_was_served_says_nothing_of_others(dispatched, monkeypatch):
    """Calls of one signature are checked once. Whatever else is looked at must be part of it."""
    views = list(torch.randn(3, 1, 9, 2, 16).unbind())
    others = torch.rand(1, 9, 2) / 16, torch.randn(2, 16, 16) / 16, torch.zeros(2, 16)
    wanted = ttt_linear(*views, *others, mini_batch_size=1)
    assert torch.equal(ttt_linear(*views, *others, mini_batch_size=1), wanted)
    for wrong in (True, 1.0):
        with pytest.raises(TypeError, match="mini_batch_size must be an int"):
            ttt_linear(*views, *others, mini_batch_size=wrong)
    with pytest.raises(TypeError, match="must share a dtype"):
        ttt_linear(views[0].bfloat16(), *views[1:], *others, mini_batch_size=1)
    with pytest.raises(ValueError, match="q's last axis must be contiguous"):
        ttt_linear(views[0].mT.contiguous().mT, *views[1:], *others, mini_batch_size=1)
    with pytest.raises(TypeError, match="must be a strided tensor"):
        ttt_linear(*views, others[0].to_sparse(), *others[1:], mini_batch_size=1)
    with pytest.raises(TypeError, match="w0 must be a tensor, got ndarray"):
        ttt_linear(*views, others[0], others[1].numpy(), others[2], mini_batch_size=1)

    swiglu(torch.randn(3, 64))
    assert not dispatched
    for make in (negated_later, lambda: torch._efficientzerotensor(3, 64)):
        swiglu(make())
    assert len(dispatched) == 2
    monkeypatch.setattr(_native, "LIBRARY", None)
    swiglu(torch.randn(3, 64))
    assert len(dispatched) == 2  # the definition ran


def test_the_signatures_that_an_op_remembers_are_limited(monkeypatch):
    monkeypatch.setattr(_contract, "MOST_SIGNATURES", 3)
    monkeypatch.setattr(OP.contract, "_accepted", {})
    for rows in range(1, 9):
        swiglu(torch.randn(rows, 64))
        assert 1 <= len(OP.contract._accepted) <= 3


@pytest.mark.parametrize(
    "listener",
    [
        lambda: FlopCounterMode(display=False),
        FakeTensorMode,
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ],
    ids=["dispatch mode", "fake tensors", "profiler"],
)
def test_whoever_listens_hears_the_call(listener):
    x = torch.randn(3, 64)
    assert is_plain((x,))
    with listener():
        assert not is_plain((x,))
    assert is_plain((x,))


@pytest.mark.parametrize("backend", [None, "dual"])
def test_autocast_leaves_the_dispatcher_out(backend, monkeypatch):
    """But for a backward pass within it, whose op turns it off."""
    op = TABLE["ttt_linear"]
    views = [x.requires_grad_() for x in torch.randn(3, 1, 40, 2, 16).unbind()]
    state = torch.randn(2, 16, 16) / 16, torch.zeros(2, 16)
    leaves = [*views, *(x.requires_grad_() for x in state)]
    eta, backward, told = torch.rand(1, 40, 2) / 16, op.backward_op, []

    def solve(within: bool = False):
        with torch.autocast("cpu", torch.bfloat16):
            o = ttt_linear(*views, eta, *leaves[3:], backend=backend)
            assert o.dtype == torch.bfloat16
            if within:
                return o, *torch.autograd.grad(o.float().square().sum(), leaves)
        return o, *torch.autograd.grad(o.float().square().sum(), leaves)

    with monkeypatch.context() as dispatching:
        dispatching.setattr(_dispatcher_bypass, "HAS_QUERIES", False)
        wanted = solve()
    monkeypatch.setattr(op, "forward_op", lambda *args: pytest.fail("dispatched"))
    monkeypatch.setattr(op, "backward_op", lambda *args: told.append(1) or backward(*args))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match="q must be a tensor, got ndarray"),
    ):
        ttt_linear(views[0].detach().numpy(), *views[1:], eta, *leaves[3:], backend=backend)
    for within in (False, True):
        got = solve(within)
        assert len(told) == within
        assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


def test_on_a_cpu_other_ops_run_in_pytorch_s_operations_under_autocast(dispatched):
    x = torch.randn(3, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = swiglu(x)
    assert "vision_ttt" not in out.grad_fn.name()
    assert not dispatched


def test_a_profile_names_the_op():
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.inference_mode(), torch.profiler.profile(activities=cpu) as profile:
        depthwise_conv2d(torch.randn(1, 12, 16), torch.randn(16, 1, 3, 3), (3, 4))
    assert "vision_ttt::depthwise_conv2d" in {event.key for event in profile.key_averages()}


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_tracers_hear_the_call():
    traced = torch.jit.trace(lambda x: swiglu(x), torch.randn(3, 64))
    assert "vision_ttt::swiglu" in str(traced.graph)


@pytest.mark.parametrize("name", ["ttt_linear", "ttt_mlp"])
def test_a_state_that_nobody_asks_for_is_not_made(name):
    q, k, v = torch.randn(3, 2, 32, 2, 16).unbind()
    eta = torch.rand(2, 32, 2) / 16
    hidden = 64
    state = {
        "ttt_linear": [(2, 16, 16), (2, 16)],
        "ttt_mlp": [(2, 16, hidden), (2, hidden), (2, hidden, 16), (2, 16)],
    }[name]
    tensors = [torch.randn(shape) / 16 for shape in state]
    op = {"ttt_linear": ttt_linear, "ttt_mlp": ttt_mlp}[name]
    o, last = op(q, k, v, eta, *tensors, return_state=True)
    assert torch.equal(op(q, k, v, eta, *tensors), o)
    for x in tensors:
        x.requires_grad_()
    kept_o, kept_last = op(q, k, v, eta, *tensors, return_state=True)
    assert torch.equal(kept_o, o)
    for x, y in zip(kept_last[: len(state)], last[: len(state)], strict=True):
        assert torch.equal(x, y)


@pytest.fixture
def dispatched_backward(monkeypatch):
    """How often the custom op of the backward pass is called."""
    calls, original = [], OP.backward_op
    monkeypatch.setattr(OP, "backward_op", lambda *args: calls.append(1) or original(*args))
    return calls


def test_a_plain_backward_pass_leaves_the_dispatcher_out(dispatched, dispatched_backward):
    x = torch.randn(3, 64, requires_grad=True)
    out = swiglu(x)
    assert out.grad_fn.name() == "vision_ttt_swigluBackward"
    (direct,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    assert not dispatched
    assert not dispatched_backward
    (wanted,) = torch.autograd.grad(OP.forward_op(x).sum(), x)
    assert torch.equal(direct, wanted)
    # What differentiates the gradient, requests a backend or maps the backward pass, takes the op.
    (again,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert again.requires_grad
    assert torch.equal(again.detach(), wanted)
    with use_backend("reference"):
        assert torch.equal(torch.autograd.grad(out.sum(), x, retain_graph=True)[0], wanted)
    assert len(dispatched_backward) == 2
    many = torch.autograd.grad(out, x, torch.ones(2, 3, 32), is_grads_batched=True)[0]
    assert torch.allclose(many[1], wanted)
    assert len(dispatched_backward) == 3


def test_a_recorded_call_survives_checkpointing_and_saved_tensor_hooks():
    x = torch.randn(3, 64, requires_grad=True)
    (wanted,) = torch.autograd.grad(swiglu(x).sum(), x)
    checkpointed = torch.utils.checkpoint.checkpoint(swiglu, x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(checkpointed.sum(), x)[0], wanted)
    with torch.autograd.graph.save_on_cpu():
        out = swiglu(x)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], wanted)


def test_a_named_backend_leaves_the_dispatcher_out_and_serves_every_derivative(monkeypatch):
    """Also the second one, for which the custom op of the backward pass is told its name."""
    op = TABLE["ttt_linear"]
    forward, backward, told = op.forward_op, op.backward_op, []
    monkeypatch.setattr(op, "forward_op", lambda *args: pytest.fail("dispatched"))
    monkeypatch.setattr(op, "backward_op", lambda *args: told.append(args[-1]) or backward(*args))
    views = [x.requires_grad_() for x in torch.randn(3, 1, 9, 2, 16).unbind()]
    others = torch.rand(1, 9, 2) / 16, torch.randn(2, 16, 16) / 16, torch.zeros(2, 16)
    for name in ("cpu", "dual"):
        used = record_kernel_calls(monkeypatch, op, name)
        out = ttt_linear(*views, *others, backend=name)
        assert len(used) == 1
        (first,) = torch.autograd.grad(out.square().sum(), views[:1], create_graph=True)
        assert first.requires_grad
    assert told == ["cpu", "dual"]
    monkeypatch.setattr(op, "forward_op", forward)
    with pytest.raises(ValueError, match="unknown backend 'magic'"):
        ttt_linear(*views, *others, backend="magic")
    with pytest.raises(ValueError, match=r"backend 'cpu' .*does not support this call"):
        ttt_linear(*(x.double() for x in views), *others, backend="cpu")
