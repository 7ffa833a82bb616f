"""Losses and gradients of a model's inner learners on given images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from vision_ttt.layers import LinearLearner, TTTLayer
from vision_ttt.models.evaluation_mode import evaluation_mode
from vision_ttt.ops.ttt_linear import InnerTrace, ttt_linear_trace

Problem = dict[str, Tensor | int]
"""The arguments of :func:`vision_ttt.ttt_linear`."""
Result = TypeVar("Result")


def trace_layers(model: nn.Module, images: Tensor) -> dict[str, InnerTrace]:
    """Trace every TTT layer of linear inner models of ``model`` on ``images``.

    Args:
        model: any model with :class:`vision_ttt.layers.TTTLinear` layers, or others of a
            :class:`vision_ttt.layers.LinearLearner`. It is not modified.
        images: the model's input, e.g. [B, C, H, W], or the tokens of a language model [B, T].

    Returns:
        Module name of each TTT layer → its :class:`InnerTrace`, in the order of the modules. For a
        layer that runs several times it is the last one. Empty for a model without TTT layers.
    """
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, TTTLayer) and isinstance(layer.learner, LinearLearner)
    }
    return examine(model, images, layers, lambda problem: ttt_linear_trace(**problem))


@torch.no_grad()
def examine(
    model: nn.Module,
    images: Tensor,
    layers: Mapping[str, TTTLayer],
    look: Callable[[Problem], Result],
) -> dict[str, Result]:
    """Run ``model`` and call ``look`` with the inner problem of each of its ``layers``.

    Returns:
        Layer's name → the result of ``look`` for its last problem.
    """
    results: dict[str, Result] = {}
    handles = []
    for name, layer in layers.items():

        def record(layer: TTTLayer, inputs: tuple, keywords: dict, name: str = name) -> None:
            x = inputs[0] if inputs else keywords["x"]  # beside it may be a state
            results[name] = look(layer.inner_problem(x))

        handles.append(layer.register_forward_pre_hook(record, with_kwargs=True))
    if not handles:  # the model may need other inputs than images
        return results
    try:
        with evaluation_mode(model):
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    return results


def inner_losses(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Mean inner-loop loss of each successive mini-batch (Vision-TTT, Fig. 11).

    Every direction counts in its own scan order. Entry i is the loss on the learners' i-th
    mini-batch, before the step on it.

    Args:
        model: any model; only its TTT layers are reported.
        images: the model's input.

    Returns:
        Module name of each TTT layer → losses [ceil(T / b)], float32 on the CPU.
    """
    losses = {}
    for name, trace in trace_layers(model, images).items():
        learner = model.get_submodule(name).learner
        forward_heads = learner.num_heads
        loss = torch.cat(
            [trace.loss[:, :, :forward_heads], trace.loss[:, :, forward_heads:].flip(1)], dim=2
        )  # [B, T, heads] in scan order
        batches = loss.float().split(learner.mini_batch_size, dim=1)
        losses[name] = torch.stack([batch.mean() for batch in batches]).cpu()
    return losses
