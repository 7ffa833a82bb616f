"""Derivatives of gradients, as gradient penalties take them, against the definition's."""

import pytest
import timm
import torch

import vision_ttt  # noqa: F401, registers the models
from hostile_calls import (
    Sizes,
    conv1d_arguments,
    conv2d_arguments,
    correlation_arguments,
    fused_arguments,
    linear_arguments,
    mlp_arguments,
    norm_arguments,
    normal,
)
from tolerances import assert_close
from vision_ttt.layers import TTTLinear
from vision_ttt.ops import swiglu, ttt_linear, ttt_mlp, use_backend
from vision_ttt.ops.depthwise_conv2d import cpu as conv2d
from vision_ttt.ops.depthwise_conv2d.reference import depthwise_conv2d_reference
from vision_ttt.ops.depthwise_correlation.cpu import depthwise_correlation_op
from vision_ttt.ops.depthwise_correlation.reference import depthwise_correlation_reference
from vision_ttt.ops.directional_conv1d import cpu as conv1d
from vision_ttt.ops.directional_conv1d.reference import directional_conv1d_reference
from vision_ttt.ops.fused_ttt_linear.cpu import fused_ttt_linear_op
from vision_ttt.ops.fused_ttt_linear.reference import fused_ttt_linear_reference
from vision_ttt.ops.gated_norm import cpu as norm
from vision_ttt.ops.gated_norm.reference import gated_norm_reference
from vision_ttt.ops.swiglu.reference import swiglu_reference
from vision_ttt.ops.ttt_linear.autograd import ttt_linear_op
from vision_ttt.ops.ttt_linear.reference import ttt_linear_reference
from vision_ttt.ops.ttt_mlp.autograd import ttt_mlp_op
from vision_ttt.ops.ttt_mlp.reference import ttt_mlp_reference

S = Sizes()
OPS = {
    "directional_conv1d": (
        conv1d.directional_conv1d_op, directional_conv1d_reference, lambda: conv1d_arguments(S)
    ),
    "depthwise_conv2d": (
        conv2d.depthwise_conv2d_op, depthwise_conv2d_reference, lambda: conv2d_arguments(S)
    ),
    "depthwise_correlation": (
        depthwise_correlation_op, depthwise_correlation_reference, lambda: correlation_arguments(S)
    ),
    "gated_norm": (norm.gated_norm_op, gated_norm_reference, lambda: norm_arguments(S)),
    "no gate": (
        norm.gated_norm_op, gated_norm_reference, lambda: norm_arguments(S._replace(gated=False))
    ),
    "swiglu": (swiglu, swiglu_reference, lambda: [normal(2, 5, 64)]),
    "ttt_linear": (
        lambda *a: ttt_linear_op(*a, True, "auto")[0],
        lambda *a: ttt_linear_reference(*a)[0],
        lambda: linear_arguments(S),
    ),
    "ttt_linear, last state": (
        lambda *a: ttt_linear_op(*a, True, "dual")[1],
        lambda *a: ttt_linear_reference(*a)[1],
        lambda: linear_arguments(S._replace(gated=False)),
    ),
    "ttt_mlp": (
        lambda *a: ttt_mlp_op(*a, True, "auto")[0],
        lambda *a: ttt_mlp_reference(*a)[0],
        lambda: mlp_arguments(S),
    ),
    "fused_ttt_linear": (
        lambda *a: fused_ttt_linear_op(*a, True)[0],
        fused_ttt_linear_reference,
        lambda: fused_arguments(S),
    ),
}  # fmt: skip


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


@pytest.mark.parametrize(("op", "definition", "make"), OPS.values(), ids=OPS)
def test_gradient_of_a_gradient_penalty(op, definition, make):
    torch.manual_seed(0)
    arguments = make()
    got = penalty_gradients(op, arguments, torch.float32)
    wanted = penalty_gradients(definition, arguments, torch.float64)
    for i, (x, exact) in enumerate(zip(got, wanted, strict=True)):
        assert_close(x, exact, 2e-4, str(i))


@pytest.mark.parametrize(("op", "make"), [(ttt_linear, linear_arguments), (ttt_mlp, mlp_arguments)])
def test_gradgradcheck(op, make):
    torch.manual_seed(0)
    *tensors, scale, b, reverse, eps = make(Sizes(1, 2, 2, 1, 2, mini_batch=3))
    tensors = [x.double().requires_grad_() for x in (*tensors, scale)]

    def function(*tensors):
        options = {"mini_batch_size": b, "reverse_heads": reverse, "eps": eps}
        return op(*tensors[:-1], position_scale=tensors[-1], **options, backend="dual")

    assert torch.autograd.gradgradcheck(function, tuple(tensors))


def test_third_derivative():
    x = normal(2, 5, 64).requires_grad_()
    exact = x.detach().double().requires_grad_()
    thirds = []
    for op, start in ((swiglu, x), (swiglu_reference, exact)):
        value = op(start)
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
