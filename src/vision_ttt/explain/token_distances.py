"""Distances of the image tokens to the tokens that a model classifies by."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vision_ttt.explain.feature_maps import assertions_as_errors, check_images, token_grid
from vision_ttt.models.evaluation_mode import evaluation_mode


@torch.no_grad()
def token_distances(model: nn.Module, images: Tensor) -> Tensor:
    """‖x_t − g_i‖₂ of every image token to every global one (Mamba-Reg, Figs. 1 and 6).

    Both are after the final norm, or before it in a ViT of timm that pools first. Global tokens are
    the class tokens or registers, in the order of the sequence; of a model without any it is the
    mean of the image tokens. In Fig. 1 a token of the background as near as the object's is an
    artefact; in Fig. 6 each register has a map.

    Args:
        model: a plain backbone of this package, also compiled or of ``for_inference``, or timm's
            VisionTransformer. It is not modified.
        images: [B, C, H, W], normalised as for the model.

    Returns:
        Distances [B, n, h, w] of n global tokens, float32.

    Raises:
        TypeError: the model is not such a backbone.
        ValueError: the images do not fit the model.
    """
    check_images(images)
    with evaluation_mode(model), assertions_as_errors():
        if hasattr(model, "split_tokens"):  # also of a compiled or packed plain backbone
            tokens, others = model.split_tokens(model.forward_features(images))
        elif hasattr(model, "num_prefix_tokens") and hasattr(model, "forward_features"):
            prefix = model.num_prefix_tokens
            x = model.forward_features(images)
            tokens, others = x[:, prefix:], x[:, :prefix] if prefix else None
        else:
            raise TypeError(
                "token distances need a plain backbone of vision_ttt or timm's VisionTransformer,"
                f" got {type(model).__name__}"
            )
    grid, _ = token_grid(model, images)
    others = tokens.mean(1, keepdim=True) if others is None else others
    # By default matrix products are used, whose rounding exceeds small distances.
    exact = "donot_use_mm_for_euclid_dist"
    distances = torch.cdist(others.float(), tokens.float(), compute_mode=exact)  # [B, n, T]
    return distances.unflatten(2, grid)
