"""A linear layer by our own products against PyTorch's function."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt.ops import linear
from vision_ttt.ops._table import TABLE
from vision_ttt.ops.swiglu_mlp import swiglu_mlp

pytestmark = pytest.mark.kernels

MANY = 1700  # tokens: several parts with sums of their own, the last of them shorter
LARGE = (
    784,
    800,
)  # columns and inner axis: twenty-five tiles of the weight's gradient, the last narrow
DEEP = (2096, 2064)  # each more than what all tokens use at once of a packed weight


def make_arguments(*lead, dim=48, columns=272, bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    x, weight = torch.randn(*lead, dim), torch.randn(columns, dim) / dim
    given = [x, weight, torch.randn(columns) if bias else None]
    return [None if t is None else t.to(dtype).requires_grad_() for t in given]


def values_and_gradients(function, arguments):
    out = function(*arguments)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    given = [t for t in arguments if t is not None]
    return [out, *torch.autograd.grad((out * weights).sum(), given)]


def in_float64(arguments):
    return [None if t is None else t.detach().double().requires_grad_() for t in arguments]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(), (1,), (2, 7), (2, 3, 4), (MANY,)])
def test_values_and_gradients(lead, bias):
    arguments = make_arguments(*lead, bias=bias)
    assert TABLE["linear"].choose(TABLE["linear"].inputs(*arguments)) == "cpu"
    got = values_and_gradients(linear, arguments)
    wanted = values_and_gradients(F.linear, in_float64(arguments))
    for i, (x, y) in enumerate(zip(got, wanted, strict=True)):
        assert_close(x, y, (GRADIENT if i else FORWARD)[torch.float32])


@pytest.mark.parametrize("sizes", [LARGE, DEEP])
def test_large_weights(sizes):
    columns, dim = sizes
    arguments = make_arguments(300, dim=dim, columns=columns)
    got = values_and_gradients(linear, arguments)
    wanted = values_and_gradients(F.linear, in_float64(arguments))
    for i, (x, y) in enumerate(zip(got, wanted, strict=True)):
        assert_close(x, y, (GRADIENT if i else FORWARD)[torch.float32])


def test_slices_of_columns_and_of_the_inner_axis():
    """More columns than a slice of the gradient has, and more inputs than a factor of it."""
    torch.manual_seed(0)
    arguments = [torch.randn(s).mul(0.3).requires_grad_() for s in ((MANY, 304), (1040, 304))]
    exact = [x.detach().double().requires_grad_() for x in arguments]
    got, wanted = values_and_gradients(linear, arguments), values_and_gradients(F.linear, exact)
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b, 2e-6)


@pytest.mark.parametrize("sizes", [(7, 16), (16, 7)])
def test_other_sizes_are_pytorchs(sizes):
    dim, columns = sizes
    arguments = make_arguments(2, 9, dim=dim, columns=columns)
    wanted = values_and_gradients(F.linear, arguments)
    for x, y in zip(values_and_gradients(linear, arguments), wanted, strict=True):
        assert torch.equal(x, y)


def test_no_tokens():
    out, *gradients = values_and_gradients(linear, make_arguments(0))
    assert out.shape == (0, 272)
    assert not any(g.any() for g in gradients)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (linear, [(MANY, 48), (272, 48)]),
        (linear, [(300, LARGE[1]), LARGE]),
        (swiglu_mlp, [(MANY, 48), (544, 48), (32, 272)]),
    ],
    ids=["linear", "large linear", "swiglu_mlp"],
)
def test_sums_of_several_parts_have_the_same_bits_whatever_the_threads(function, shapes):
    torch.manual_seed(0)
    arguments = [torch.randn(shape).mul(0.3).requires_grad_() for shape in shapes]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(values_and_gradients(function, arguments))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_autocast_casts_as_pytorch_does():
    arguments = make_arguments(2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, wanted = (values_and_gradients(f, arguments) for f in (linear, F.linear))
    for x, y in zip(got, wanted, strict=True):
        assert x.dtype == y.dtype
        assert_close(x, y, 2e-2)


def test_flops_are_pytorchs():
    arguments = make_arguments(2, 9)

    def count(function):
        with FlopCounterMode(display=False) as counter:
            function(*arguments).sum().backward()
        return counter.get_total_flops()

    assert count(linear) == count(F.linear)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 9, 31), (96, 32), (96,)), "weight must have shape"),
        (((2, 9, 32), (96, 32), (95,)), "bias must have shape"),
    ],
)
def test_what_does_not_fit_is_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        linear(*map(torch.randn, shapes))
    with pytest.raises(ValueError, match=message):
        TABLE["linear"].forward_op(*map(torch.randn, shapes))


@pytest.mark.parametrize(("inner", "columns"), [(16, 32), (192, 112), (700 // 16 * 16, 48)])
def test_it_is_as_exact_as_pytorch_at_any_size_of_numbers(inner, columns):
    """Where the processor has tile registers, factors are sums of three bfloat16 terms.

    Some of PyTorch's libraries sum a long inner axis in parts, with half the error of one sum.
    """
    torch.manual_seed(0)
    for scale in (1e-12, 1.0, 1e15):
        x = (scale * torch.randn(300, inner)).requires_grad_()
        weight = torch.randn(columns, inner, requires_grad=True)
        exact = values_and_gradients(F.linear, in_float64([x, weight, None]))
        got = values_and_gradients(linear, [x, weight, None])
        pytorch = values_and_gradients(F.linear, [x, weight, None])
        for mine, theirs, wanted in zip(got, pytorch, exact, strict=True):
            assert (mine - wanted).norm() < 3 * (theirs - wanted).norm(), scale
    x, unit = torch.full((300, inner), 3e38), torch.eye(columns, inner)
    assert torch.equal(linear(x, unit, None), F.linear(x, unit))
    assert not linear(x / 0, unit, None).isfinite().any()
