"""Gradient magnitude maps: which tokens the inner learners of a Vittt learn most from."""

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


def gradient_magnitude_maps(
    model: Vittt, images: Tensor, block: int = -1, *, state: str = "final"
) -> Tensor:
    """‖G_t‖ of every image token (Vision-TTT, Eq. 6 and Fig. 9), averaged over heads.

    G_t is the gradient of the inner loss of token t with respect to the inner weights; its
    Frobenius norm says how much there is to learn from that token. To a learner in which state?

    - "final": to one that has just learnt from all of the image. What still surprises it is what
      the rest of the image does not tell. All tokens meet the same learner, so that the map shows
      the image and not the scan: this is the default.
    - "initial": to one that has seen nothing. All tokens meet the same learner again, but an
      ignorant one: on photographs flat regions often come out brightest. Where a scan has few
      mini-batches it can be the clearer map, for a few steps leave a final state that remembers
      the last of them best.
    - "current": to the learner at that moment of the scan, which is the paper's definition. The
      first mini-batch of each direction meets one that knows nothing and outshines the rest: on
      photographs of 1,024 tokens its 32 tokens hold 46 to 94 % of the map's energy ‖G_t‖², and
      2 to 4 % of that of the other two (even shares would be 3 %).

    Args:
        model: a Vittt of linear inner models.
        images: [B, C, H, W], normalised as for the model.
        block: index of the block whose learners are asked; the last by default.
        state: "final", "initial" or "current".

    Returns:
        Maps [B, h, w] on the token grid, float32, ≥ 0, in the units of the gradient.

    Raises:
        TypeError: the model is not a Vittt, or the block's inner models are not linear.
        IndexError: there is no such block.
        ValueError: an unknown state.
    """
    if state not in STATES:
        raise ValueError(f"state must be one of {', '.join(STATES)}, got {state!r}")
    if not isinstance(model, Vittt):
        raise TypeError(f"gradient magnitude maps are of a Vittt, got {type(model).__name__}")
    index = range(len(model.blocks))[block]
    layer = model.blocks[index].mixer.ttt
    if not isinstance(layer, TTTLinear):
        raise TypeError(
            f"gradient magnitude maps are of linear inner models (TTTLinear); block {index} has "
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
        _, (w, b) = ttt_linear(**problem, return_state=True)
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
