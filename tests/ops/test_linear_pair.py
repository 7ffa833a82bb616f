"""A wide and a narrow linear layer in one op: all ways of the kernels, one result, autocast."""

import pytest
import torch

from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt.ops import linear_pair
from vision_ttt.ops._table import TABLE

pytestmark = pytest.mark.kernels

OP = TABLE["linear_pair"]


def make_arguments(*lead, inner=32, columns=48, narrow=6):
    torch.manual_seed(0)
    shapes = (*lead, inner), (columns, inner), (narrow, inner), (narrow,)
    return [torch.randn(shape).mul(0.3).requires_grad_() for shape in shapes]


def op_of(x, wide, *narrow):
    return linear_pair(x, wide, narrow)


def definition(*tensors):
    return OP.definition(OP.inputs(*tensors))


def values_and_gradients(function, arguments):
    results = function(*arguments)
    ramps = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape).cos() for x in results]
    loss = sum((x * ramp).sum() for x, ramp in zip(results, ramps, strict=True))
    return [*results, *torch.autograd.grad(loss, arguments)]


def assert_same(arguments):
    exact = [x.detach().double().requires_grad_() for x in arguments]
    pairs = zip(
        values_and_gradients(op_of, arguments), values_and_gradients(definition, exact), strict=True
    )
    for index, (x, y) in enumerate(pairs):
        assert_close(x, y, (FORWARD if index < 2 else GRADIENT)[torch.float32])


@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 7), (2, 3, 4)])
def test_shapes(lead):
    assert_same(make_arguments(*lead))


@pytest.mark.parametrize("narrow", [1, 6, 16, 17, 40])
@pytest.mark.parametrize("rows", [9, 300, 1700])
def test_columns(rows, narrow):
    """300 rows run in tile registers, if there, and 1700 in several parts."""
    assert_same(make_arguments(rows, narrow=narrow))


@pytest.mark.parametrize(
    ("inner", "columns"),
    [(2064, 32), (208, 1040), (784, 1552)],
    ids=["a deep layer", "several slices", "a large layer"],
)
def test_sizes(inner, columns):
    assert_same(make_arguments(300, inner=inner, columns=columns))


@pytest.mark.parametrize("result", [0, 1])
def test_one_of_both_results_is_used(result):
    arguments = make_arguments(9)
    exact = [x.detach().double().requires_grad_() for x in arguments]
    pairs = [
        torch.autograd.grad(function(*tensors)[result].square().sum(), tensors, allow_unused=True)
        for function, tensors in ((op_of, arguments), (definition, exact))
    ]
    for x, y in zip(*pairs, strict=True):
        assert_close(x, torch.zeros_like(x) if y is None else y, GRADIENT[torch.float32])


def test_no_tokens():
    *results, dx, dwide, dnarrow, dbias = values_and_gradients(op_of, make_arguments(0))
    assert [x.shape for x in results] == [(0, 48), (0, 6)]
    assert dx.shape == (0, 32)
    assert not any(x.any() for x in (dwide, dnarrow, dbias))


def test_autocast_casts_as_linear_layers_do():
    arguments = make_arguments(2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = values_and_gradients(op_of, arguments)
        wanted = values_and_gradients(definition, arguments)
    assert got[0].dtype == got[1].dtype == torch.bfloat16
    for x, y in zip(got, wanted, strict=True):
        assert x.dtype == y.dtype
        assert_close(x, y, 2e-2)


@pytest.mark.parametrize(
    ("place", "shape", "message"),
    [
        (1, (48, 31), "wide must have shape"),
        (2, (6, 31), "narrow must have shape"),
        (3, (5,), "narrow_bias must have shape"),
    ],
)
def test_what_does_not_fit_is_refused(place, shape, message):
    arguments = make_arguments(9)
    arguments[place] = torch.randn(shape)
    with pytest.raises(ValueError, match=message):
        op_of(*arguments)
