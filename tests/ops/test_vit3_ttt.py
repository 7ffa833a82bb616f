"""ViT³'s inner steps: closed forms against torch.func.grad of the loss that the paper states."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad
from torch.library import opcheck

from tolerances import assert_close
from vision_ttt.ops import depthwise_conv2d, use_backend
from vision_ttt.ops.swiglu_mlp.matrix_products import TOKENS_AT_ONCE
from vision_ttt.ops.vit3_ttt import (
    depthwise,
    depthwise_correlation,
    depthwise_gradient_norms,
    depthwise_step,
    gated_unit,
    gated_unit_gradient_norms,
    gated_unit_step,
)

SCALE = 1 / 3  # 9^-½, as released, in both losses


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unit_problem(batch=2, tokens=11, heads=3, width=4, dtype=torch.float64):
    """k, v [B, T, H, d], W₁, W₂ [H, d, d]."""
    views = (randn(batch, tokens, heads, width, seed=seed, dtype=dtype) for seed in (1, 2))
    states = (randn(heads, width, width, seed=seed, dtype=dtype) for seed in (3, 4))
    return *views, *states


def stated_unit_step(k: Tensor, v: Tensor, w1: Tensor, w2: Tensor):
    """One image and head: k, v [T, d], W [d, d]."""

    def loss(states):
        w1, w2 = states
        return -SCALE / len(k) * ((k @ w1) * F.silu(k @ w2) * v).sum()

    gradients = grad(loss)((w1, w2))
    clipped = (g / (g.square().sum(0, keepdim=True).sqrt() + 1) for g in gradients)
    return tuple(w - g for w, g in zip((w1, w2), clipped, strict=True))


def stated_convolution_step(k: Tensor, v: Tensor, w: Tensor):
    """One image: k, v [C, h, w], w [C, 1, 3, 3]."""

    def loss(w):
        return -SCALE / k[0].numel() * (F.conv2d(k, w, padding=1, groups=len(k)) * v).sum()

    gradient = grad(loss)(w)
    norm = gradient.flatten(1).norm(dim=1)[:, None, None, None]
    return w - gradient / (norm + 1)


@pytest.mark.parametrize("tokens", [1, 11])
def test_gated_unit_step_is_gradient_descent_on_the_stated_loss(tokens):
    k, v, w1, w2 = unit_problem(tokens=tokens)
    got = gated_unit_step(k, v, w1, w2)
    for image in range(2):
        for head in range(3):
            wanted = stated_unit_step(k[image, :, head], v[image, :, head], w1[head], w2[head])
            for a, b in zip(got, wanted, strict=True):
                assert_close(a[image, head], b, 1e-12)


@pytest.mark.parametrize("grid", [(1, 1), (1, 5), (3, 4)])
def test_depthwise_step_is_gradient_descent_on_the_stated_loss(grid):
    tokens = grid[0] * grid[1]
    k, v, w3 = randn(2, tokens, 5, seed=1), randn(2, tokens, 5, seed=2), randn(5, 1, 3, 3)
    got = depthwise_step(k, v, w3, grid)
    for image in range(2):
        maps = (x[image].T.unflatten(1, grid) for x in (k, v))
        assert_close(got[image].unsqueeze(1), stated_convolution_step(*maps, w3), 1e-12)


def test_gated_unit_gradient_norms_are_those_of_each_token_s_share_of_the_loss():
    k, v, w1, w2 = unit_problem()
    got = gated_unit_gradient_norms(k, v, w1, w2)
    assert got.shape == (2, 11, 3)

    def share(states, k, v):
        return -SCALE / 11 * ((k @ states[0]) * F.silu(k @ states[1]) * v).sum()

    for image, t, head in torch.cartesian_prod(*(torch.arange(size) for size in got.shape)):
        gradients = grad(share)((w1[head], w2[head]), k[image, t, head], v[image, t, head])
        assert_close(got[image, t, head], torch.stack(gradients).norm(), 1e-12)


@pytest.mark.parametrize("grid", [(1, 1), (1, 5), (3, 4)])
def test_depthwise_gradient_norms_are_those_of_each_token_s_share_of_the_loss(grid):
    tokens = grid[0] * grid[1]
    k, v, w3 = randn(2, tokens, 5, seed=1), randn(2, tokens, 5, seed=2), randn(5, 1, 3, 3)
    got = depthwise_gradient_norms(k, v, grid, 3)
    assert got.shape == (2, tokens)

    def shares(w, k, v):  # [T]
        o = F.conv2d(k.T.unflatten(1, grid), w, padding=1, groups=len(w))
        return -SCALE / tokens * (o.flatten(1).T * v).sum(-1)

    for image in range(2):
        gradients = torch.func.jacrev(shares)(w3, k[image], v[image])  # [T, C, 1, 3, 3]
        assert_close(got[image], gradients.flatten(1).norm(dim=1), 1e-12)


def test_gradient_norms_of_half_precision_are_float32():
    k, v, w1, w2 = (x.bfloat16() for x in unit_problem())
    exact = gated_unit_gradient_norms(*(x.double() for x in (k, v, w1, w2)))
    got = gated_unit_gradient_norms(k, v, w1, w2)
    assert got.dtype == torch.float32
    assert_close(got, exact, 1e-5)
    k, v = (x.flatten(2)[:, :10] for x in (k, v))
    exact = depthwise_gradient_norms(k.double(), v.double(), (2, 5), 3)
    got = depthwise_gradient_norms(k, v, (2, 5), 3)
    assert got.dtype == torch.float32
    assert_close(got, exact, 1e-5)


def test_answers_are_the_trained_models():
    q, (w1, w2) = randn(2, 6, 3, 4), (randn(2, 3, 4, 4, seed=seed) for seed in (1, 2))
    wanted = torch.einsum("bthd,bhde->bthe", q, w1)
    wanted = wanted * F.silu(torch.einsum("bthd,bhde->bthe", q, w2))
    assert_close(gated_unit(q, w1, w2), wanted, 1e-12)
    q, w3 = randn(2, 6, 5), randn(2, 5, 3, 3, seed=3)
    for image in range(2):
        wanted = depthwise_conv2d(q[image : image + 1], w3[image].unsqueeze(1), (2, 3))
        assert_close(depthwise(q, w3, (2, 3))[image : image + 1], wanted, 1e-12)


def test_a_step_takes_the_loss_down():
    k, v, w1, w2 = unit_problem(tokens=40)
    before = (gated_unit(k, w1, w2) * v).sum((1, 3))
    after = (gated_unit(k, *gated_unit_step(k, v, w1, w2)) * v).sum((1, 3))
    assert (after > before).all()


def test_gradcheck_of_the_steps():
    k, v, w1, w2 = (x.requires_grad_() for x in unit_problem(tokens=5, heads=2, width=3))
    assert torch.autograd.gradcheck(gated_unit_step, (k, v, w1, w2))
    k, v, w3 = (randn(*shape).requires_grad_() for shape in ((2, 6, 2), (2, 6, 2), (2, 1, 3, 3)))
    assert torch.autograd.gradcheck(lambda *x: depthwise_step(*x, (2, 3)), (k, v, w3))


def test_values_that_teach_nothing_leave_the_state_and_finite_gradients():
    k, v, w1, w2 = unit_problem()
    v = torch.zeros_like(v).requires_grad_()
    moved = gated_unit_step(k, v, w1, w2)
    assert torch.equal(moved[0], w1.expand_as(moved[0]))
    sum(x.sum() for x in moved).backward()
    assert torch.isfinite(v.grad).all()
    assert v.grad.abs().max() > 0


def test_inference_in_parts_is_the_same_as_training_at_once():
    tokens = 2 * TOKENS_AT_ONCE + 7
    k, v, w1, w2 = unit_problem(tokens=tokens, width=16, dtype=torch.float32)
    wanted = gated_unit_step(*(x.double() for x in (k, v, w1, w2)))
    trained = gated_unit_step(k, v, w1, w2)
    with torch.no_grad():
        inferred = gated_unit_step(k, v, w1, w2)
        with use_backend("reference"):
            plain = gated_unit_step(k, v, w1, w2)
    for results in zip(trained, inferred, plain, wanted, strict=True):
        for got in results[:3]:
            assert_close(got, results[3], 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_views_are_learnt_from_in_float32(dtype):
    views = [200 * x.to(dtype) for x in unit_problem(tokens=300, dtype=torch.float32)[:2]]
    states = unit_problem(dtype=torch.float32)[2:]
    wanted = gated_unit_step(*(x.double() for x in (*views, *states)))
    with torch.autocast("cpu", dtype=dtype):
        got = gated_unit_step(*views, *states)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == torch.float32
        assert_close(a, b, 1e-5)
    k, v = (x.flatten(2) for x in views)
    w3 = randn(12, 1, 3, 3, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        got = depthwise_step(k, v, w3, (20, 15))
    assert got.dtype == torch.float32
    assert_close(got, depthwise_step(k.double(), v.double(), w3.double(), (20, 15)), 1e-5)


def strided(*shape, seed):
    """Slices of a wider tensor, as a fused projection gives them."""
    return randn(*shape[:-1], 3 * shape[-1], seed=seed, dtype=torch.float32)[..., : shape[-1]]


@pytest.mark.parametrize("grid", [(1, 1), (1, 9), (9, 1), (5, 7)])
@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_correlation_kernel_and_its_gradients(grid, kernel_size):
    x, y = (strided(2, grid[0] * grid[1], 32, seed=seed) for seed in (1, 2))
    weights = randn(32, 1, kernel_size, kernel_size)

    def results(x, y):
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        out = depthwise_correlation(x, y, grid, kernel_size)
        return out, *torch.autograd.grad((out * weights).sum(), (x, y))

    got, wanted = results(x, y), results(x.double(), y.double())
    assert "vision_ttt" in got[0].grad_fn.name()
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b, 1e-5)


def test_correlation_is_the_weight_gradient_of_the_convolution():
    x, y = randn(2, 12, 3, seed=1), randn(2, 12, 3, seed=2)
    weight = randn(3, 1, 3, 3).requires_grad_()
    (depthwise_conv2d(x, weight, (3, 4)) * y).sum().backward()
    assert_close(depthwise_correlation(x, y, (3, 4)), weight.grad, 1e-12)


def test_correlation_is_a_sound_custom_op():
    x, y = (randn(1, 12, 16, seed=s, dtype=torch.float32).requires_grad_() for s in (1, 2))
    opcheck(torch.ops.vision_ttt.depthwise_correlation, (x, y, 3, 4, 3))
