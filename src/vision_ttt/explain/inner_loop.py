"""What the inner learners of a model do on given images: their losses and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from vision_ttt.layers import TTTLinear
from vision_ttt.models.evaluation_mode import evaluation_mode
from vision_ttt.ops.ttt_linear import InnerTrace, ttt_linear_trace

Problem = dict[str, Tensor | int]
"""The arguments of :func:`vision_ttt.ttt_linear`."""
Result = TypeVar("Result")


def trace_layers(model: nn.Module, images: Tensor) -> dict[str, InnerTrace]:
    """Trace every :class:`vision_ttt.layers.TTTLinear` of ``model`` while it sees ``images``.

    Args:
        model: any model that holds TTT layers; it is left as it was.
        images: what the model takes, e.g. [B, C, H, W].

    Returns:
        For each TTT layer's module name its :class:`InnerTrace` (its last, where the model runs
        the layer several times), in the order of the modules; empty for a model without.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, TTTLinear)}
    return examine(model, images, layers, lambda problem: ttt_linear_trace(**problem))


@torch.no_grad()
def examine(
    model: nn.Module,
    images: Tensor,
    layers: Mapping[str, TTTLinear],
    look: Callable[[Problem], Result],
) -> dict[str, Result]:
    """Run ``model`` and ``look`` at the inner problem that each of its ``layers`` is given.

    Returns:
        For each layer's name what ``look`` says of its last problem.
    """
    results: dict[str, Result] = {}
    handles = []
    for name, layer in layers.items():

        def record(layer: TTTLinear, inputs: tuple, keywords: dict, name: str = name) -> None:
            results[name] = look(layer.inner_problem(*inputs, **keywords))

        handles.append(layer.register_forward_pre_hook(record, with_kwargs=True))
    if not handles:  # nor would every model be content with images alone
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

    Both directions count in their own scan order, so entry i is what the learners lose on their
    i-th mini-batch, before they have learnt from it.

    Args:
        model: any model; only its TTT layers are reported.
        images: what the model takes.

    Returns:
        For each TTT layer's module name the losses [ceil(T / b)], float32 on the CPU.
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
