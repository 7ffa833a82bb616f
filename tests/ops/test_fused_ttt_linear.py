"""The layer's fused op against the composition that it stands for: values, gradients, memory."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernel_calls import record_kernel_calls
from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt import for_training, to_plain
from vision_ttt.layers import TTTLinear
from vision_ttt.ops import use_backend
from vision_ttt.ops._table import TABLE

pytestmark = pytest.mark.kernels

fused_ttt_linear_op = TABLE["fused_ttt_linear"].forward_op
VITTT = {"bidirectional": True, "share_qk": True, "gate": True}
LAYOUTS = {
    "vittt": VITTT,
    "one direction": {},
    "own q": {"bidirectional": True, "gate": True},
    "no gate": {"bidirectional": True, "share_qk": True},
    "shared state": VITTT | {"learnable_states": 1},
    "fixed state": VITTT | {"learnable_states": 0},
    "large steps": VITTT | {"base_learning_rate": 4.0},
    "no steps": VITTT | {"base_learning_rate": 0.0},
    "long convolution": VITTT | {"conv_kernel_size": 6},
    "pointwise": VITTT | {"conv_kernel_size": 1},
    "small mini-batches": VITTT | {"mini_batch_size": 5},
}


def make_layer(dim=64, heads=2, **layout):
    torch.manual_seed(0)
    layer = for_training(TTTLinear(dim, heads, **({"conv_kernel_size": 4} | layout)), strict=True)
    for parameter in layer.parameters():  # none at a value that hides a term
        if parameter.ndim < 3:
            torch.nn.init.normal_(parameter, 0.1 if parameter.ndim == 1 else 0, 0.2)
    return layer


def values_and_gradients(layer, x):
    x = x.detach().requires_grad_()
    out = layer(x)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    gradients = torch.autograd.grad((out * weights).sum(), [x, *layer.parameters()])
    return out, dict(zip(names, gradients, strict=True))


def assert_same(layer, x):
    out, gradients = values_and_gradients(layer, x)
    exact = to_plain(copy.deepcopy(layer).double())
    wanted, wanted_gradients = values_and_gradients(exact, x.double())
    assert_close(out, wanted, FORWARD[torch.float32])
    for name, gradient in gradients.items():
        if wanted_gradients[name].abs().max() == 0:
            assert gradient.abs().max() == 0, name
        else:
            assert_close(gradient, wanted_gradients[name], GRADIENT[torch.float32], name)


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of the kernel."""
    return record_kernel_calls(monkeypatch, TABLE["fused_ttt_linear"])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts(layout, calls):
    assert_same(make_layer(**layout), torch.randn(2, 37, 64))
    assert len(calls) == 1  # not in float64


@pytest.mark.parametrize("length", [1, 3, 15, 16, 17, 130, 600])
def test_lengths(length):
    assert_same(make_layer(**VITTT), torch.randn(1, length, 64))


@pytest.mark.parametrize(("dim", "heads"), [(16, 1), (192, 3), (128, 1), (96, 6)])
def test_dimensions(dim, heads):
    assert_same(make_layer(dim, heads, **VITTT), torch.randn(2, 70, dim))


def test_what_the_kernel_does_not_take_runs_op_by_op(calls):
    x = torch.randn(2, 9, 64)

    def assert_composed(layer, x, tolerance):
        plain = to_plain(copy.deepcopy(layer))
        out, gradients = values_and_gradients(layer, x)
        wanted, wanted_gradients = values_and_gradients(plain, x)
        assert out.dtype == wanted.dtype
        assert_close(out, wanted, tolerance)
        for name, gradient in gradients.items():
            assert_close(gradient, wanted_gradients[name], tolerance, name)

    assert_composed(make_layer(mini_batch_size=65, **VITTT), x, 5e-6)
    assert_composed(make_layer(heads=8), x, 5e-6)  # head dimension 8
    assert_composed(make_layer(24, 1, **VITTT), x[..., :24], 5e-6)
    assert_composed(make_layer().double(), x.double(), 1e-12)
    assert_composed(make_layer(**VITTT).bfloat16(), x.bfloat16(), 2e-2)
    with use_backend("dual"):
        assert_composed(make_layer(**VITTT), x, 1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_composed(make_layer(**VITTT), x, 2e-2)
    assert not calls
    layer = make_layer()
    wanted = torch.vmap(lambda x: layer(x[None])[0])(x)
    assert not calls
    assert_close(layer(x), wanted, 1e-6)
    assert calls


def test_the_op_itself_runs_where_its_kernel_does_not(calls):
    """As a program does that was exported elsewhere."""
    layer, x = make_layer(32, 2, **VITTT), torch.randn(2, 9, 32)
    wanted = layer(x)
    arguments = [x.double() if isinstance(x, torch.Tensor) else x for x in calls[0][:-1]]
    out, *nothing = fused_ttt_linear_op(*arguments, False)
    assert_close(layer.out_proj(out.float()), wanted, 1e-6)
    assert not any(x.numel() for x in nothing)
    torch.library.opcheck(
        fused_ttt_linear_op,
        ([x.detach() if isinstance(x, torch.Tensor) else x for x in arguments] + [False]),
    )
    with pytest.raises(ValueError, match=r"dtype torch\.float64 is not one of"):
        fused_ttt_linear_op(*arguments, True)


@pytest.mark.parametrize("part", ["conv_q", "conv_k", "merge"])
@pytest.mark.parametrize("gradients", [False, True])
def test_parameters_in_another_precision_are_not_read_as_float32(part, gradients, calls):
    layer = make_layer(**VITTT)
    layer.get_submodule(part).double()
    with torch.set_grad_enabled(gradients), pytest.raises(TypeError, match="is float64, "):
        layer(torch.randn(2, 20, 64))
    assert not calls


def test_learners_parameters_may_have_fewer_bits(calls):
    layer = make_layer(**VITTT)
    layer.learner.bfloat16()
    exact = copy.deepcopy(layer)
    exact.learner.float()
    x = torch.randn(2, 20, 64)
    assert torch.equal(layer(x), exact(x))
    assert len(calls) == 2


@pytest.mark.parametrize("layout", [VITTT, {"bidirectional": True}, {}], ids=["vittt", "q", "one"])
def test_inference_gives_the_same_bits_and_leaves_its_input(layout):
    layer, x = make_layer(**layout), torch.randn(2, 50, 64)
    before = x.clone()
    wanted = layer(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(layer(x), wanted)
            assert torch.equal(layer(x.transpose(0, 1).contiguous().transpose(0, 1)), wanted)
    assert torch.equal(x, before)


def op_arguments(layer, x, calls):
    """What the layer hands to the kernel's op, the tensors as leaves."""
    calls.clear()
    layer(x)
    ((*arguments, _),) = calls
    leaves = [x.detach().requires_grad_() for x in arguments[:13]]
    return leaves, arguments[13:]


def test_backward_needs_what_forward_kept(calls):
    tensors, options = op_arguments(make_layer(32, 2), torch.randn(1, 9, 32), calls)
    out, *_ = fused_ttt_linear_op(*tensors, *options, False)
    with pytest.raises(RuntimeError, match="was called without saving tensors"):
        out.sum().backward()


def test_as_many_flops_as_op_by_op():
    layer, x = make_layer(**VITTT), torch.randn(2, 70, 64, requires_grad=True)

    def count(call):
        with FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops()

    def step():
        layer(x).sum().backward()

    in_one, in_one_step = count(lambda: layer(x)), count(step)
    to_plain(layer)
    assert count(lambda: layer(x)) == in_one
    assert count(step) == in_one_step


def test_compiles_as_one_graph():
    layer, x = make_layer(**VITTT), torch.randn(2, 40, 64)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (40, 23):
        out, gradients = values_and_gradients(compiled, x[:, :length])
        wanted, wanted_gradients = values_and_gradients(layer, x[:, :length])
        assert_close(out, wanted, 1e-6)
        for got, name in zip(gradients.values(), wanted_gradients, strict=True):
            assert_close(got, wanted_gradients[name], 1e-5, name)
        with torch.no_grad():
            assert_close(compiled(x[:, :length]), wanted, 1e-6)
