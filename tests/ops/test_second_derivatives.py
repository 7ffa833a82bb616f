"""Derivatives of gradients, as gradient penalties take them, against the definition's."""

import pytest
import timm
import torch

import vision_ttt  # noqa: F401, registers the models
from hostile_calls import ARGUMENTS, Sizes, linear_arguments, mlp_arguments, normal
from tolerances import assert_close
from vision_ttt.layers import TTTLinear
from vision_ttt.ops import swiglu, ttt_linear, ttt_mlp, use_backend
from vision_ttt.ops._table import TABLE


def penalty_gradients(op, arguments, dtype):
    """Gradients of Σ of the squared gradients of a loss."""
    arguments = [
        x.to(dtype, copy=True).requires_grad_() if isinstance(x, torch.Tensor) else x
        for x in arguments
    ]
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    out = op(*arguments)
    weights = torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape)
    loss = (out.square() * weights).sum()
    options = {"allow_unused": True, "materialize_grads": True}  # the last state knows no q
    gradients = torch.autograd.grad(loss, tensors, create_graph=True, **options)
    penalty = sum(g.square().sum() for g in gradients)
    return torch.autograd.grad(penalty, tensors, **options)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("op", TABLE.values(), ids=TABLE)
def test_gradient_of_a_gradient_penalty(op, gated):
    torch.manual_seed(0)
    arguments = ARGUMENTS[op.name](Sizes(gated=gated))
    # Of a learner that is not gated the last result of the state, by its second backend.
    place, backend = (0, "auto") if gated or not op.backend_at_runtime else (1, "dual")
    extra = () if op.kept is None else (True, backend) if op.backend_at_runtime else (True,)

    def one(out):
        return out if isinstance(out, torch.Tensor) else out[place]

    got = penalty_gradients(lambda *a: one(op.forward_op(*a, *extra)), arguments, torch.float32)
    wanted = penalty_gradients(
        lambda *a: one(op.definition(op.inputs(*a))), arguments, torch.float64
    )
    for i, (x, exact) in enumerate(zip(got, wanted, strict=True)):
        assert_close(x, exact, 2e-4, str(i))


@pytest.mark.parametrize(("op", "make"), [(ttt_linear, linear_arguments), (ttt_mlp, mlp_arguments)])
def test_gradgradcheck(op, make):
    torch.manual_seed(0)
    *tensors, scale, b, reverse, eps = make(Sizes(1, 3, 1, 1, 2, mini_batch=2))
    tensors = [x.double().requires_grad_() for x in (*tensors, scale)]

    def function(*tensors):
        options = {"mini_batch_size": b, "reverse_heads": reverse, "eps": eps}
        return op(*tensors[:-1], position_scale=tensors[-1], **options, backend="dual")

    assert torch.autograd.gradgradcheck(function, tuple(tensors))


def test_third_derivative():
    x = normal(2, 5, 64).requires_grad_()
    exact = x.detach().double().requires_grad_()
    op = TABLE["swiglu"]
    thirds = []

    def definition(x):
        return op.definition(op.inputs(x))

    for function, start in ((swiglu, x), (definition, exact)):
        value = function(start)
        for _ in range(3):
            (value,) = torch.autograd.grad(value.sin().sum(), start, create_graph=True)
        thirds.append(value)
    assert_close(*thirds, 1e-4)


def test_gradient_penalty_of_a_layer_and_a_model():
    torch.manual_seed(0)
    layer = TTTLinear(64, 2, bidirectional=True, conv_kernel_size=4, gate=True)
    model = timm.create_model("vittt_nano_patch4_32", depth=1, img_size=16).eval()
    for module, x in ((layer, torch.randn(2, 20, 64)), (model, torch.randn(2, 3, 16, 16))):
        outcomes = []
        for backend in (None, "reference"):
            x = x.detach().requires_grad_()
            with use_backend(backend):
                (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
                penalty = gradient.square().sum()
                wanted = [p for p in module.parameters() if p.ndim > 1]
                outcomes.append(torch.autograd.grad(penalty, wanted, allow_unused=True))
        for got, exact in zip(*outcomes, strict=True):
            assert (got is None) == (exact is None)
            if got is not None:
                assert_close(got, exact, 1e-3)
