"""The MLP in one op against its definition: values, gradients, memory, transforms."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt.ops import swiglu_mlp, use_backend
from vision_ttt.ops._table import TABLE
from vision_ttt.ops.swiglu_mlp import matrix_products

pytestmark = pytest.mark.kernels

OP = TABLE["swiglu_mlp"]
OTHERS = {torch.float64: 1e-12, torch.bfloat16: 2.5e-2, torch.float16: 6.5e-3}
"""Dtypes that PyTorch's products serve. Sums of hundreds of shares in them are further off."""


def swiglu_mlp_definition(*tensors):
    return OP.definition(OP.inputs(*tensors))


def make_arguments(*lead, dim=32, hidden=48, out=32, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = (*lead, dim), (2 * hidden, dim), (out, hidden)
    return [torch.randn(shape).mul(0.3).to(dtype).requires_grad_() for shape in shapes]


def values_and_gradients(function, arguments):
    out = function(*arguments)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), arguments)]


def assert_same(arguments, forward=FORWARD[torch.float32], gradient=GRADIENT[torch.float32]):
    exact = [x.detach().double().requires_grad_() for x in arguments]
    got = values_and_gradients(swiglu_mlp, arguments)
    wanted = values_and_gradients(swiglu_mlp_definition, exact)
    for x, y, tolerance in zip(got, wanted, (forward, *[gradient] * 3), strict=True):
        assert x.dtype == arguments[0].dtype
        assert_close(x, y, tolerance)


def make_normed(*lead, dim=48, hidden=272, dtype=torch.float32):
    x, up, down = make_arguments(*lead, dim=dim, hidden=hidden, out=dim, dtype=dtype)
    return [x, up, down, *(torch.randn(dim).mul(0.3).requires_grad_() for _ in range(2))]


def normed(residual=True):
    return lambda x, up, down, *norm: swiglu_mlp(x, up, down, norm=norm, residual=residual)


def assert_normed_same(arguments, residual, tolerance=GRADIENT[torch.float32]):
    exact = [t.detach().double().requires_grad_() for t in arguments]
    got = values_and_gradients(normed(residual), arguments)
    wanted = values_and_gradients(lambda *t: swiglu_mlp_definition(*t, residual), exact)
    for a, b, t in zip(got, wanted, [arguments[0], *arguments], strict=True):
        assert a.dtype == t.dtype
        assert_close(a, b, tolerance)


@pytest.mark.parametrize(("residual", "hidden"), [(True, 272), (False, 272), (True, 640)])
@pytest.mark.parametrize("backend", [None, "dual"])
def test_norm_and_residual_over_several_parts_and_slices(residual, hidden, backend):
    with use_backend(backend):
        assert_normed_same(make_normed(1700, hidden=hidden), residual)


@pytest.mark.parametrize("dtype", OTHERS)
def test_norm_and_residual_in_other_precisions(dtype, monkeypatch):
    monkeypatch.setattr(matrix_products, "TOKENS_AT_ONCE", 1)
    arguments = make_normed(5, 80, hidden=48, dtype=dtype)
    if dtype == torch.float64:
        arguments = [t.detach().to(dtype).requires_grad_() for t in arguments]
    assert_normed_same(arguments, True, OTHERS[dtype])


def test_a_residual_without_a_norm():
    x, up, down = make_arguments(2, 9)
    wanted = x + swiglu_mlp(x, up, down)
    assert_close(swiglu_mlp(x, up, down, residual=True), wanted, FORWARD[torch.float32])


def test_under_autocast_norm_and_sum_are_as_precise_as_x():
    x, up, down, *norm = arguments = make_normed(2, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = values_and_gradients(normed(), arguments)
        branch = swiglu_mlp(F.layer_norm(x, (48,), *norm, 1e-6), up, down)
    assert got[0].dtype == torch.float32
    assert torch.equal(got[0], x + branch)
    assert [g.dtype for g in got[1:]] == [t.dtype for t in arguments]


@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 7), (2, 3, 4)])
def test_shapes(lead):
    assert_same(make_arguments(*lead))


@pytest.mark.parametrize("sizes", [(16, 5, 3), (7, 16, 9), (192, 512, 192), (48, 272, 80)])
def test_sizes(sizes):
    dim, hidden, out = sizes
    assert_same(make_arguments(2, 9, dim=dim, hidden=hidden, out=out))
    assert_same(make_arguments(300, dim=dim, hidden=hidden, out=out))  # in tile registers, if there


@pytest.mark.parametrize("tokens", [1, 4, 1000])
def test_some_tokens_after_the_others(tokens, monkeypatch):
    monkeypatch.setattr(matrix_products, "TOKENS_AT_ONCE", tokens)
    assert_same(make_arguments(2, 9))


@pytest.mark.parametrize("dtype", OTHERS)
def test_other_precisions(dtype, monkeypatch):
    monkeypatch.setattr(matrix_products, "TOKENS_AT_ONCE", 1)
    assert_same(make_arguments(5, 80, dtype=dtype), *2 * [OTHERS[dtype]])


def test_another_backend_computes_the_same():
    with use_backend("dual"):
        assert_same(make_arguments(2, 9))


def test_no_tokens():
    x, up, down = make_arguments(0)
    out, *gradients = values_and_gradients(swiglu_mlp, [x, up, down])
    assert out.shape == (0, 32)
    assert not any(g.any() for g in gradients)


def test_autocast_casts_as_linear_layers_do():
    arguments = make_arguments(2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = values_and_gradients(swiglu_mlp, arguments)
        wanted = values_and_gradients(swiglu_mlp_definition, arguments)
    assert got[0].dtype == torch.bfloat16
    for x, y in zip(got, wanted, strict=True):
        assert x.dtype == y.dtype
        assert_close(x, y, 2e-2)


def test_second_derivatives():
    arguments = make_arguments(1, 3, dim=4, hidden=3, out=2, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(swiglu_mlp, tuple(arguments))


def test_transforms_look_inside():
    x, up, down = (x.detach() for x in make_arguments(3, 5))
    wanted = swiglu_mlp(x, up, down)
    assert_close(torch.vmap(lambda x: swiglu_mlp(x, up, down))(x), wanted, 1e-6)
    _, slope = torch.func.jvp(lambda x: swiglu_mlp(x, up, down), (x,), (x,))
    _, exact = torch.func.jvp(lambda x: swiglu_mlp_definition(x, up, down), (x,), (x,))
    assert_close(slope, exact, 1e-6)


def test_flops():
    arguments = make_arguments(2, 9)
    with FlopCounterMode(display=False) as counter:
        out = swiglu_mlp(*arguments)
        forward = counter.get_total_flops()
        out.sum().backward()
    products = 2 * 18 * 32 * 96, 2 * 18 * 48 * 32
    assert forward == sum(products)
    assert counter.get_total_flops() - forward == 3 * products[0] + 2 * products[1]


@pytest.mark.parametrize("make", [make_arguments, make_normed])
def test_only_arguments_are_kept(make):
    arguments, kept = make(40), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu_mlp(*arguments) if len(arguments) == 3 else normed()(*arguments)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in arguments}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 9, 31), (96, 32), (32, 48)), "up must have shape"),
        (((2, 9, 32), (95, 32), (32, 48)), "up must have shape"),
        (((2, 9, 32), (96, 32), (32, 47)), "down must have shape"),
    ],
)
def test_what_does_not_fit_is_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        swiglu_mlp(*map(torch.randn, shapes))
    with pytest.raises(ValueError, match=message):
        OP.forward_op(*map(torch.randn, shapes), None, None, False, 1e-6)


def test_dtypes_that_differ_are_refused():
    x, up, down = make_arguments(2, 9)
    with pytest.raises(TypeError, match="x and down must share a dtype"):
        swiglu_mlp(x, up, down.bfloat16())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"norm": (torch.ones(31), torch.ones(31))}, ValueError, r"norm_weight must have shape"),
        ({"residual": 1}, TypeError, "residual must be a bool, got 1"),
        ({"eps": -1.0}, ValueError, "eps must be at least 0, got -1.0"),
        ({"eps": 10**400}, ValueError, "eps must be at most 3.4"),
        ({"eps": 1e39}, ValueError, "eps must be at most 3.4"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        swiglu_mlp(*make_arguments(2, 9), **options)


def test_a_residual_needs_as_many_columns():
    x, up, down = make_arguments(2, 9, out=48)
    for autocast in (False, True):
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
            pytest.raises(ValueError, match="residual needs as many columns as x has, 32, got 48"),
        ):
            swiglu_mlp(x, up, down, residual=True)


def test_what_is_no_tensor_is_refused():
    _, up, down = make_arguments(2, 9)
    with pytest.raises(TypeError, match="x must be a tensor, got float"):
        swiglu_mlp(1.0, up, down, residual=True)
