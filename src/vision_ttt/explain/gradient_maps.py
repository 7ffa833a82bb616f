"""Gradient magnitude maps: which tokens the inner learners of a Vittt learn most from."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.explain.inner_loop import trace_layers
from vision_ttt.models import Vittt


def gradient_magnitude_maps(
    model: Vittt, images: Tensor, block: int = -1, *, state: str = "current"
) -> Tensor:
    """‖G_t‖ of every image token (Vision-TTT, Eq. 6 and Fig. 9), averaged over heads.

    G_t is the gradient of the inner loss of token t with respect to the inner weights; its
    Frobenius norm says how much the learner has to learn from that token. The weights are those of
    the moment, so that the first mini-batch of each direction, which meets a learner that knows
    nothing, stands out; where there are few mini-batches it outshines the rest, and the initial
    state, the same for all tokens, gives the clearer map.

    Args:
        model: a Vittt.
        images: [B, C, H, W], normalised as for the model.
        block: index of the block whose learners are asked; the last by default.
        state: "current" (the paper's: before the token's mini-batch) or "initial".

    Returns:
        Maps [B, h, w] on the token grid, float32, ≥ 0, in the units of the gradient.

    Raises:
        TypeError: the model is not a Vittt.
        IndexError: there is no such block.
        ValueError: an unknown state.
    """
    if state not in ("current", "initial"):
        raise ValueError(f"state must be 'current' or 'initial', got {state!r}")
    if not isinstance(model, Vittt):
        raise TypeError(f"gradient magnitude maps are of a Vittt, got {type(model).__name__}")
    index = range(len(model.blocks))[block]
    trace = trace_layers(model, images)[f"blocks.{index}.mixer.ttt"]
    norms = trace.gradient_norm if state == "current" else trace.initial_gradient_norm
    norms = norms.float().mean(-1, keepdim=True)  # [B, N, 1]
    if model.class_tokens is not None:
        norms, _ = model.class_tokens.extract(norms)
    grid = model.patch_embed.dynamic_feat_size(images.shape[-2:])
    return norms.squeeze(-1).unflatten(1, tuple(grid)).contiguous()


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
