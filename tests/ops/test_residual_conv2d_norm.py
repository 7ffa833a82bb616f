"""The Conv2d with its residual and norm in one op, on grids of one and of several bands of rows."""

import pytest
import torch

from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt.ops import residual_conv2d_norm
from vision_ttt.ops._table import TABLE

pytestmark = pytest.mark.kernels

OP = TABLE["residual_conv2d_norm"]


def make_arguments(batch, grid, channels, kernel, dtype=torch.float32):
    torch.manual_seed(0)
    tokens = batch, grid[0] * grid[1], channels
    shapes = tokens, (channels, 1, kernel, kernel), (channels,), (channels,)
    return [torch.randn(shape).mul(0.5).to(dtype).requires_grad_() for shape in shapes]


def values_and_gradients(function, arguments, weights=(1.0, 1.0)):
    """Of a projection of both results, each with its weight."""
    results = function(*arguments)
    loss = 0
    for weight, x in zip(weights, results, strict=True):
        ramp = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)
        loss = loss + weight * (x * ramp.cos()).sum()
    gradients = torch.autograd.grad(loss, arguments, allow_unused=True)
    return list(results), [torch.zeros(1) if x is None else x for x in gradients]


def assert_same(batch, grid, channels, kernel, **options):
    arguments = make_arguments(batch, grid, channels, kernel)
    exact = [x.detach().double().requires_grad_() for x in arguments]
    got = values_and_gradients(
        lambda x, weight, *norm: residual_conv2d_norm(x, weight, norm, grid), arguments, **options
    )
    wanted = values_and_gradients(
        lambda *tensors: OP.definition(OP.inputs(*tensors, *grid, 1e-6)), exact, **options
    )
    tables = FORWARD, GRADIENT
    for table, some, others in zip(tables, got, wanted, strict=True):
        for x, y in zip(some, others, strict=True):
            assert_close(x, y.view_as(x), table[torch.float32])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize(
    ("grid", "channels"),
    [((1, 1), 16), ((2, 3), 48), ((7, 5), 32), ((1, 40), 16), ((40, 1), 16)],
)
def test_small_grids(batch, kernel, grid, channels):
    assert_same(batch, grid, channels, kernel)


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize(
    ("grid", "channels"),
    [((23, 40), 256), ((9, 200), 256), ((4, 64), 2064)],
    ids=["some bands", "rows of a fifth of a band", "bands of one row"],
)
def test_several_bands(kernel, grid, channels):
    assert_same(2, grid, channels, kernel)


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0)])
def test_one_of_both_results_is_used(weights):
    assert_same(2, (7, 5), 32, 3, weights=weights)
    x, weight, *norm = make_arguments(2, (7, 5), 32, 3)
    results = residual_conv2d_norm(x, weight, norm, (7, 5))
    alone = results[0 if weights[0] else 1].sum()
    assert all(g is not None for g in torch.autograd.grad(alone, (x, weight)))


def test_only_arguments_are_kept():
    x, weight, *norm = make_arguments(2, (7, 5), 32, 3)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        residual_conv2d_norm(x, weight, norm, (7, 5))
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (x, weight, *norm)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype):
    tolerance = 1e-12 if dtype == torch.float64 else 3e-2
    arguments = make_arguments(2, (7, 5), 32, 3, dtype)
    got = values_and_gradients(
        lambda x, weight, *norm: residual_conv2d_norm(x, weight, norm, (7, 5)), arguments
    )
    exact = [x.detach().double().requires_grad_() for x in arguments]
    wanted = values_and_gradients(
        lambda *tensors: OP.definition(OP.inputs(*tensors, 7, 5, 1e-6)), exact
    )
    for x, y in zip(got[0] + got[1], wanted[0] + wanted[1], strict=True):
        assert x.dtype == dtype
        assert_close(x, y, tolerance)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (5, 6)}, "x must have shape"),
        ({"weight": torch.ones(32, 1, 2, 2)}, "K must be odd"),
        ({"norm": (torch.ones(31), torch.ones(32))}, "norm_weight must have shape"),
        ({"eps": -1.0}, "eps must be"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    x, weight, *norm = make_arguments(2, (7, 5), 32, 3)
    arguments = {"weight": weight, "norm": norm, "grid": (7, 5), **change}
    with pytest.raises(ValueError, match=message):
        residual_conv2d_norm(x, **arguments)
