"""Losses and gradients of a model's inner learners on given images."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from vision_ttt.acceleration.evaluation_only import EvaluationOnly
from vision_ttt.layers import InnerLearner, LinearLearner, MLPLearner, TTTLayer
from vision_ttt.layers.attention_inner import TTTLinearInner
from vision_ttt.models.evaluation_mode import evaluation_mode
from vision_ttt.ops import ttt_linear, ttt_mlp
from vision_ttt.ops.inner_trace import InnerTrace, TokenLosses
from vision_ttt.ops.ttt_linear import ttt_linear_losses, ttt_linear_trace
from vision_ttt.ops.ttt_mlp import ttt_mlp_losses, ttt_mlp_trace

Problem = dict[str, Any]
"""The arguments of a learner's op, e.g. :func:`vision_ttt.ttt_linear`."""
Result = TypeVar("Result")


class InnerOp(NamedTuple):
    """A learner's op, with what explains it."""

    run: Callable[..., Any]
    trace: Callable[..., InnerTrace]
    losses: Callable[..., TokenLosses]


_OPS: dict[type[InnerLearner], InnerOp] = {
    LinearLearner: InnerOp(ttt_linear, ttt_linear_trace, ttt_linear_losses),
    MLPLearner: InnerOp(ttt_mlp, ttt_mlp_trace, ttt_mlp_losses),
}


def inner_op(layer: nn.Module) -> InnerOp | None:
    """The op of a TTT layer's learner, or None for other layers and learners."""
    if isinstance(layer, (TTTLayer, TTTLinearInner)):
        for kind, op in _OPS.items():
            if isinstance(layer.learner, kind):
                return op
    return None


def problem_of(layer: TTTLayer | TTTLinearInner, arguments: Mapping[str, Any]) -> Problem:
    """The arguments of the op of a layer's learner, from those of the layer's forward."""
    names = ("x",) if isinstance(layer, TTTLayer) else ("x", "q", "k", "v")
    return layer.inner_problem(**{name: arguments[name] for name in names})


def refuse_packed(model: nn.Module) -> None:
    """Raise a TypeError for what ``for_inference`` has made: packed blocks do not call layers."""
    if any(isinstance(module, EvaluationOnly) for module in model.modules()):
        raise TypeError(
            "a model of for_inference cannot be explained: its blocks are packed and do not call "
            "their layers; give the model that for_inference was given"
        )


def refuse_without_gradients(model: nn.Module) -> None:
    """Check that gradients with respect to images can be computed.

    Raises:
        TypeError: the model is one of ``for_inference``.
        RuntimeError: called within ``torch.inference_mode``.
    """
    refuse_packed(model)
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "there are no gradients within torch.inference_mode(): call this outside of it, or "
            "within torch.no_grad()"
        )


def learner_layers(model: nn.Module) -> dict[str, TTTLayer | TTTLinearInner]:
    """Module name → TTT layer, of linear or two-layer inner models, in the modules' order.

    The "ttt_linear" of a linearised ViT is one.

    Raises:
        TypeError: the model is one of ``for_inference``.
    """
    refuse_packed(model)
    return {name: layer for name, layer in model.named_modules() if inner_op(layer) is not None}


def trace_layers(model: nn.Module, images: Tensor) -> dict[str, InnerTrace]:
    """Trace every TTT layer of linear or two-layer inner models of ``model`` on ``images``.

    Args:
        model: any model with :class:`vision_ttt.layers.TTTLinear` or
            :class:`vision_ttt.layers.TTTMLP` layers, or others of their learners. It is not
            modified.
        images: the model's input, e.g. [B, C, H, W], or the tokens of a language model [B, T].

    Returns:
        Module name of each TTT layer → its :class:`vision_ttt.ops.inner_trace.InnerTrace`, in the
        order in which they run. For a layer that runs several times it is the last one. Empty for
        a model without such layers.

    Raises:
        TypeError: the model is one of ``for_inference``, whose blocks do not call their layers.
    """

    def look(layer: nn.Module, arguments: Mapping[str, Any]) -> InnerTrace:
        return inner_op(layer).trace(**problem_of(layer, arguments))

    return examine(model, images, learner_layers(model), look)


@torch.no_grad()
def examine(
    model: nn.Module,
    images: Tensor,
    layers: Mapping[str, nn.Module],
    look: Callable[[nn.Module, Mapping[str, Any]], Result],
) -> dict[str, Result]:
    """Run ``model`` in evaluation mode and look into the calls of some of its layers.

    What a layer receives is gone after its ``look``: of all layers only the results are kept.

    Args:
        model: it is not modified. A compiled one runs uncompiled.
        images: its input.
        layers: name → module of the model.
        look: called with each layer and the arguments of its forward by their names.

    Returns:
        Layer's name → the result of ``look`` for its last call, in the order of calls.

    Raises:
        ValueError: there are layers, and no image.
    """
    if layers and not len(images):
        raise ValueError(f"there must be at least one image, got {list(images.shape)}")
    results: dict[str, Result] = {}
    handles = []
    for name, layer in layers.items():
        # Of the class: what stands in for a layer's forward need not name its arguments.
        signature = inspect.signature(type(layer).forward)
        signature = signature.replace(parameters=[*signature.parameters.values()][1:])

        def record(
            layer: nn.Module,
            inputs: tuple,
            keywords: dict,
            name: str = name,
            signature: inspect.Signature = signature,
        ) -> None:
            results[name] = look(layer, signature.bind(*inputs, **keywords).arguments)

        handles.append(layer.register_forward_pre_hook(record, with_kwargs=True))
    if not handles:  # the model may need other inputs than images
        return results
    try:
        # A graph compiled earlier calls no hooks.
        with evaluation_mode(model), torch.compiler.set_stance("force_eager"):
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    return results
