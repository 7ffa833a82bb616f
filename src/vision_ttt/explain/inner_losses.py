"""What the inner learners lose along the sequence, in the order in which they scan it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from vision_ttt.explain.inner_loop import (
    examine,
    inner_op,
    learner_layers,
    problem_of,
    trace_layers,
)

Direction = Literal["forth", "back"]


class LossCourse(NamedTuple):
    """A layer's inner losses along its scan, each [T], float32 on the CPU.

    They are ½‖f(k_t; W) − v_t‖² of the token that each direction reads t-th, the mean over
    images and heads: ``initial`` with W₀, before any step; ``before`` with the state before the
    token's mini-batch; ``updated`` with W_t, after the step that includes the token.
    """

    initial: Tensor
    before: Tensor
    updated: Tensor


def inner_losses(
    model: nn.Module, images: Tensor, direction: Direction | None = None
) -> dict[str, Tensor]:
    """Mean inner-loop loss of each successive mini-batch (Vision-TTT, Fig. 11).

    Every direction counts in its own scan order; the paper's figure has "forth" alone. Entry i is
    the loss on the learners' i-th mini-batch, before the step on it.

    Args:
        model: any model; only its TTT layers are reported.
        images: the model's input.
        direction: count the heads of one direction only.

    Returns:
        Module name of each TTT layer → losses [ceil(T / b)], float32 on the CPU.
    """
    losses = {}
    for name, trace in trace_layers(model, images).items():
        learner = model.get_submodule(name).learner
        loss = in_scan_order(trace.loss, learner.reverse_heads, direction).float()  # [B, T, heads]
        batches = loss.split(learner.mini_batch_size, dim=1)
        losses[name] = torch.stack([batch.mean() for batch in batches]).cpu()
    return losses


def inner_loss_course(
    model: nn.Module, images: Tensor, direction: Direction | None = None
) -> dict[str, LossCourse]:
    """Inner losses of every token of the scan, before and after its step (TTT, Fig. 5).

    The paper's figure has ℓ(W₀; x_t), ℓ(W_{t−1}; x_t) and ℓ(W_t; x_t); with mini-batches of b
    tokens the second is taken at the state before the mini-batch. If ``updated`` is below
    ``before``, a step learns its own token. If ``before`` is below ``initial``, the learner has
    learnt from the earlier tokens.

    Args:
        model: any model; only its TTT layers are reported.
        images: the model's input, e.g. [B, C, H, W], or the tokens of a language model [B, T].
        direction: count the heads of one direction only.

    Returns:
        Module name of each TTT layer → its :class:`LossCourse`.
    """

    def look(layer: nn.Module, arguments: Mapping[str, Any]) -> LossCourse:
        trace = inner_op(layer).trace(**problem_of(layer, arguments))
        kinds = trace.initial_loss, trace.loss, trace.updated_loss
        ordered = (in_scan_order(loss, layer.learner.reverse_heads, direction) for loss in kinds)
        return LossCourse(*(loss.float().mean((0, 2)).cpu() for loss in ordered))

    return examine(model, images, learner_layers(model), look)


def in_scan_order(x: Tensor, reverse_heads: int, direction: Direction | None = None) -> Tensor:
    """x [B, T, heads, …] with the tokens of the last ``reverse_heads`` heads from T to 1.

    Raises:
        ValueError: the direction is unknown, or no head has it.
    """
    forth, back = x.tensor_split([x.shape[2] - reverse_heads], dim=2)
    parts = {"forth": forth, "back": back.flip(1)}
    chosen = [parts[each] for each in parts if direction in (None, each)]
    found = torch.cat(chosen, dim=2) if chosen else back[:, :, :0]
    if not found.shape[2]:
        raise ValueError(
            f"no head of this layer scans in the direction {direction!r}; known are forth and back"
        )
    return found
