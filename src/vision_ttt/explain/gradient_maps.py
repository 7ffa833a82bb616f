"""Gradient magnitude maps: the size of the inner learners' gradient of every token of a Vittt."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from vision_ttt.explain.inner_loop import Problem, examine
from vision_ttt.layers import TTTLinear
from vision_ttt.models import Vittt
from vision_ttt.ops import ttt_linear
from vision_ttt.ops.ttt_linear import ttt_linear_trace

STATES = ("final", "initial", "current")
"""The states of the learner at which gradients are computed."""


def gradient_magnitude_maps(
    model: Vittt, images: Tensor, block: int = -1, *, state: str = "final"
) -> Tensor:
    """‖G_t‖ of every image token (Vision-TTT, Eq. 6 and Fig. 9), averaged over heads.

    G_t is the gradient of the inner loss of token t with respect to the inner weights. Its
    Frobenius norm measures how much the learner can learn from that token. It depends on the
    learner's state:

    - "final", the default: after learning from the whole image. The gradient is large for tokens
      that the rest of the image does not predict. All tokens meet the same state, so that the map
      depends on the image and not on the scan.
    - "initial": before any step. All tokens meet the same state, too, but an untrained one: on
      photographs flat regions are often brightest. For scans of few mini-batches this map can be
      clearer, because the final state after few steps depends mostly on the last of them.
    - "current": before the token's mini-batch, which is the paper's definition. The first
      mini-batch of each direction meets an untrained state and dominates the map: on photographs of
      1,024 tokens its 32 tokens have 46 to 94 % of the map's energy ‖G_t‖², and 2 to 4 % of the
      energy of the other two maps (equal shares would be 3 %).

    Args:
        model: a Vittt of linear inner models.
        images: [B, C, H, W], normalised as for the model.
        block: index of the block whose learners are used; the last by default.
        state: "final", "initial" or "current".

    Returns:
        Maps [B, h, w] on the token grid, float32, ≥ 0, in the units of the gradient.

    Raises:
        TypeError: the model is not a Vittt, or the block's inner models are not linear.
        IndexError: the model has no such block.
        ValueError: the state is unknown.
    """
    if state not in STATES:
        raise ValueError(f"state must be one of {', '.join(STATES)}, got {state!r}")
    if not isinstance(model, Vittt):
        raise TypeError(f"gradient magnitude maps need a Vittt, got {type(model).__name__}")
    index = range(len(model.blocks))[block]
    layer = model.blocks[index].mixer.ttt
    if not isinstance(layer, TTTLinear):
        raise TypeError(
            f"gradient magnitude maps need linear inner models (TTTLinear); block {index} has "
            f"{type(layer).__name__}"
        )
    norms = examine(model, images, {"": layer}, partial(_gradient_norm, state=state))[""]
    norms = norms.float().mean(-1, keepdim=True)  # [B, N, 1]
    if model.class_tokens is not None:
        norms, _ = model.class_tokens.extract(norms)
    grid = model.patch_embed.dynamic_feat_size(images.shape[-2:])
    return norms.squeeze(-1).unflatten(1, tuple(grid)).contiguous()


def _gradient_norm(problem: Problem, state: str) -> Tensor:
    """‖G_t‖ [B, N, heads] of one layer's tokens."""
    if state == "final":
        _, (w, b, *_) = ttt_linear(**problem, return_state=True)
        problem = {**problem, "w0": w, "b0": b}
    trace = ttt_linear_trace(**problem)
    return trace.gradient_norm if state == "current" else trace.initial_gradient_norm


def top_fraction(maps: Tensor, fraction: float = 0.3) -> Tensor:
    """Mark the tokens of largest gradient in each map (Vision-TTT, Fig. 10 marks 30 %).

    Args:
        maps: [B, h, w].
        fraction: share of the tokens to mark, in (0, 1].

    Returns:
        Boolean [B, h, w] with max(1, round(fraction · h · w)) marks each.

    Raises:
        ValueError: the fraction is outside (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be in (0, 1], got {fraction}")
    flat = maps.flatten(1)
    count = max(1, round(fraction * flat.shape[1]))
    marks = torch.zeros_like(flat, dtype=torch.bool)
    return marks.scatter_(1, flat.topk(count).indices, True).view(maps.shape)
