"""The MLP in one op against its definition: values, gradients, memory, transforms."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt.layers import SwiGLU
from vision_ttt.ops import _native, normed_swiglu_mlp, swiglu_mlp, use_backend
from vision_ttt.ops._table import TABLE
from vision_ttt.ops.swiglu_mlp import matrix_products

pytestmark = pytest.mark.kernels

OP = TABLE["swiglu_mlp"]


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


@pytest.mark.parametrize("instruction_set", ["avx2", "amx"])  # by which kept_units() decides
@pytest.mark.parametrize(("residual", "hidden"), [(True, 272), (False, 272), (True, 640)])
def test_norm_and_residual_over_several_parts_and_slices(
    residual, hidden, instruction_set, monkeypatch
):
    monkeypatch.setattr(_native, "instruction_set", lambda: instruction_set)
    x, up, down = make_arguments(1700, dim=48, hidden=hidden, out=48)
    norm = [torch.randn(48).mul(0.3).requires_grad_() for _ in range(2)]
    arguments = [x, *norm, up, down]
    got = values_and_gradients(
        lambda x, weight, bias, up, down: normed_swiglu_mlp(
            x, (weight, bias), up, down, residual=residual
        ),
        arguments,
    )
    op = TABLE["normed_swiglu_mlp"]
    exact = [t.detach().double().requires_grad_() for t in arguments]
    wanted = values_and_gradients(lambda *t: op.definition(op.inputs(*t, residual, 1e-6)), exact)
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b, GRADIENT[torch.float32])


@pytest.mark.skipif(_native.LIBRARY is None, reason="the kernels are not built")
@pytest.mark.parametrize(("instruction_set", "units"), [("avx2", 192), ("amx", 0)])
def test_the_normed_mlp_keeps_a_part_of_the_hidden_layer(instruction_set, units, monkeypatch):
    monkeypatch.setattr(_native, "instruction_set", lambda: instruction_set)
    x, up, down = make_arguments(40, dim=48, hidden=272, out=48)
    norm, kept = (torch.ones(48), torch.zeros(48)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        normed_swiglu_mlp(x, norm, up, down)
    *arguments, hidden = kept
    assert {t.data_ptr() for t in arguments} == {t.data_ptr() for t in (x, *norm, up, down)}
    assert hidden.shape == (40, 2 * units)
    a, b = (F.layer_norm(x, (48,), eps=1e-6) @ up.T).chunk(2, dim=1)
    if units:
        wanted = torch.cat([a[:, :units], b[:, :units]], 1)
        assert_close(hidden, wanted, FORWARD[torch.float32])
    with pytest.raises(ValueError, match="kept must have"):
        TABLE["normed_swiglu_mlp"].backward_op(
            x, x, *norm, up, down, torch.zeros(40, 6), True, 1e-6
        )


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions(dtype):
    tolerance = 1e-12 if dtype == torch.float64 else 3e-2
    assert_same(make_arguments(2, 40, dtype=dtype), tolerance, tolerance)


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


def test_only_arguments_are_kept():
    x, up, down = make_arguments(2, 9)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu_mlp(x, up, down)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (x, up, down)}


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
        OP.forward_op(*map(torch.randn, shapes))


def test_dtypes_that_differ_are_refused():
    x, up, down = make_arguments(2, 9)
    with pytest.raises(TypeError, match="x and down must share a dtype"):
        swiglu_mlp(x, up, down.bfloat16())


def test_the_layer_and_its_switch():
    torch.manual_seed(0)
    plain, fused, x = SwiGLU(32, 48), SwiGLU(32, 48, fused=True), torch.randn(2, 9, 32)
    fused.load_state_dict(plain.state_dict())
    assert_close(fused(x), plain(x), 1e-6)
    with pytest.raises(ValueError, match="SwiGLU: fc1 is not called while fused is True"):
        fused.fc1 = torch.nn.Linear(32, 96)
    fused.fused = False
    fused.fc1 = torch.nn.Linear(32, 96)
    gate, value = fused.fc1(x).chunk(2, -1)
    assert_close(fused(x), F.linear(F.silu(gate) * value, fused.fc2.weight), 1e-6)
    with pytest.raises(ValueError, match="fused can be switched off later, not on"):
        fused.fused = True
