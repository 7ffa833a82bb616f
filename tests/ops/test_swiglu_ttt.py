"""swiglu_ttt: its step is the gradient of the stated loss; what it saves; what it refuses."""

import pytest
import torch
import torch.nn.functional as F

from tolerances import GRADIENT, assert_close
from vision_ttt.ops import swiglu_ttt
from vision_ttt.ops.swiglu_mlp import matrix_products
from vision_ttt.ops.swiglu_ttt import swiglu_ttt_gradient_norms


def problem(length=7, dtype=torch.float64, heads=2, dim=16):
    torch.manual_seed(0)
    views = (torch.randn(2, length, heads, dim, dtype=dtype) for _ in range(3))
    states = (torch.randn(heads, dim, dim, dtype=dtype) / dim**0.5 for _ in range(3))
    return [*views, *states]


def inner_model(x, w1, w2, w3):
    return (F.silu(x @ w1) * (x @ w2)) @ w3


def test_the_step_is_autograd_s_on_the_stated_loss():
    q, k, v, *states = problem()
    wanted = torch.empty_like(q)
    for image in range(2):
        for head in range(2):
            w = [x[head].clone().requires_grad_() for x in states]
            outputs = inner_model(k[image, :, head], *w)
            loss = -(outputs * v[image, :, head]).sum() * 16**-0.5 / 7
            stepped = [x - g for x, g in zip(w, torch.autograd.grad(loss, w), strict=True)]
            wanted[image, :, head] = inner_model(q[image, :, head], *stepped)
    assert_close(swiglu_ttt(q, k, v, *states), wanted, 1e-12)


def test_gradient_norms_are_those_of_each_token_s_share_of_the_loss(monkeypatch):
    monkeypatch.setattr(matrix_products, "TOKENS_AT_ONCE", 3)
    _, k, v, *states = problem()
    got = swiglu_ttt_gradient_norms(k, v, *states)
    assert got.shape == (2, 7, 2)

    def share(w, k, v):
        return -(inner_model(k, *w) * v).sum() * 16**-0.5 / 7

    for image, t, head in torch.cartesian_prod(*(torch.arange(size) for size in got.shape)):
        w = tuple(x[head] for x in states)
        gradients = torch.func.grad(share)(w, k[image, t, head], v[image, t, head])
        assert_close(got[image, t, head], torch.stack(gradients).norm(), 1e-12)
    half = [x.bfloat16() for x in (k, v, *states)]
    exact = swiglu_ttt_gradient_norms(*(x.double() for x in half))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(swiglu_ttt_gradient_norms(*half), exact.float(), 1e-5)
    with pytest.raises(ValueError, match="swiglu_ttt: v must have shape"):
        swiglu_ttt_gradient_norms(k, v[:, :2], *states)


def test_the_order_of_the_training_tokens_does_not_matter():
    q, k, v, *states = problem()
    order = torch.randperm(7)
    assert_close(
        swiglu_ttt(q, k[:, order], v[:, order], *states), swiglu_ttt(q, k, v, *states), 1e-12
    )


def test_chunks_of_tokens_are_one_step(monkeypatch):
    tensors = [x.requires_grad_() for x in problem(dtype=torch.float32)]
    wanted = swiglu_ttt(*tensors)
    gradients = torch.autograd.grad(wanted.square().sum(), tensors)
    monkeypatch.setattr(matrix_products, "TOKENS_AT_ONCE", 3)
    got = swiglu_ttt(*tensors)
    assert_close(got, wanted, 1e-5)
    for a, b in zip(torch.autograd.grad(got.square().sum(), tensors), gradients, strict=True):
        assert_close(a, b, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_views_are_learnt_from_in_float32(dtype):
    """The gradients of states in float32 are that exact."""

    def solve(tensors):
        tensors = [x.detach().requires_grad_() for x in tensors]
        out = swiglu_ttt(*tensors)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        return [out, *torch.autograd.grad((out * weights.to(out.dtype)).sum(), tensors)]

    views, states = problem(50, torch.float32)[:3], problem(50, torch.float32)[3:]
    given = [*(x.to(dtype) for x in views), *states]
    got, wanted = solve(given), solve([x.double() for x in given])
    for x, exact in zip(got, wanted, strict=True):
        assert_close(x, exact, GRADIENT[x.dtype])
    assert [x.dtype for x in got] == [dtype] * 4 + [torch.float32] * 3


def test_the_arguments_alone_are_saved_for_the_backward_pass():
    tensors = [x.requires_grad_() for x in problem(dtype=torch.float32)]
    saved = []

    def note(x):
        saved.append(x.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        swiglu_ttt(*tensors)
    assert set(saved) == {x.data_ptr() for x in tensors}


@pytest.mark.parametrize(
    ("place", "change", "error", "message"),
    [
        (1, lambda x: x[:, 1:], ValueError, r"k must have shape \[2, 7, 2, 16\], got"),
        (3, lambda x: x[:1], ValueError, r"w1 must have shape \[2, 16, 16\], got \[1, 16"),
        (5, lambda x: x[..., 1:], ValueError, "w3 must have shape"),
        (2, lambda x: x.bfloat16(), TypeError, "q and v must share a dtype"),
        (4, lambda x: None, TypeError, "w2 must be a tensor, got NoneType"),
    ],
)
def test_what_does_not_fit_is_refused(place, change, error, message):
    arguments = problem(dtype=torch.float32)
    arguments[place] = change(arguments[place])
    with pytest.raises(error, match=f"swiglu_ttt: {message}"):
        swiglu_ttt(*arguments)


def test_no_tokens_are_refused():
    message = r"T must be at least 1, got q \[2, 0, 2, 16\]"
    with pytest.raises(ValueError, match=message):
        swiglu_ttt(*problem(length=0))
