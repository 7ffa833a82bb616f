"""Token norms: the size of every image token after every block, and the outliers among them."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor, nn

from vision_ttt.explain.feature_maps import feature_maps
from vision_ttt.models.evaluation_mode import evaluation_mode
from vision_ttt.models.plain_backbone import PlainBackbone

OUTLIER = 3.0
"""Norm over the median of the image's tokens, above which a token counts as an outlier."""


def token_norms(model: nn.Module, images: Tensor) -> Tensor:
    """‖x_t‖₂ of every image token after every block (Mamba-Reg, Figs. 2 to 4).

    In trained plain backbones some tokens of the background have far larger norms than the others:
    they hold information on the whole image in place of their patch's. Registers are to take that
    over. The norm is that of the residual stream, before the final norm, which would rescale it.
    Class tokens and registers are left out.

    Args:
        model: a backbone of one token grid with timm's ``forward_intermediates``: every plain
            backbone of this package, timm's VisionTransformer. It is not modified.
        images: [B, C, H, W], normalised as for the model.

    Returns:
        Norms [B, layers, h, w] on the token grid, float32.

    Raises:
        TypeError: the model is not such a backbone.
        ValueError: the images do not fit the model, or its layers have several grids, for which
            there is :func:`stage_norms`.
    """
    norms = stage_norms(model, images)
    if len(norms) > 1:
        grids = ", ".join(f"{h} × {w}" for *_, h, w in (stage.shape for stage in norms))
        raise ValueError(
            f"{type(model).__name__} has layers of several grids ({grids}): use stage_norms"
        )
    return norms[0]


@torch.no_grad()
def stage_norms(model: nn.Module, images: Tensor) -> list[Tensor]:
    """:func:`token_norms` of a backbone whose grid changes from stage to stage.

    Args:
        model: any backbone with timm's ``forward_intermediates``; H-ViT³ and timm's ResNet and
            ConvNeXt give one map per stage. It is not modified.
        images: [B, C, H, W], normalised as for the model.

    Returns:
        For each grid, in the order of the layers, norms [B, layers, h, w], float32.

    Raises:
        TypeError: the model is not such a backbone.
        ValueError: the images do not fit the model.
    """
    with evaluation_mode(model):
        if isinstance(model, PlainBackbone):
            return [_block_norms(model, images)]
        norms = [features.float().norm(dim=1) for features in feature_maps(model, images)]
    return [torch.stack(list(own), dim=1) for _, own in groupby(norms, lambda each: each.shape)]


def _block_norms(model: PlainBackbone, images: Tensor) -> Tensor:
    """[B, layers, h, w], with the features of one block at a time in memory."""
    norms = []
    x, context = model.embed(images)
    for index in range(len(model.blocks)):
        x = model.run_blocks(x, context, index, index + 1)
        tokens, _ = model.split_tokens(x)
        norms.append(tokens.float().norm(dim=-1).unflatten(1, tuple(context[0])))
    return torch.stack(norms, dim=1)


def outlier_share(norms: Tensor, multiple: float = OUTLIER) -> Tensor:
    """Share of an image's tokens whose norm exceeds ``multiple`` times their median.

    Args:
        norms: [..., h, w], e.g. of :func:`token_norms`. Of an even number of tokens the median is
            the lower of the middle two.
        multiple: above 0.

    Returns:
        Shares [...] from 0 to 1.

    Raises:
        ValueError: the multiple is not above 0.
    """
    if not multiple > 0:
        raise ValueError(f"multiple must be above 0, got {multiple}")
    tokens = norms.flatten(-2)
    median = tokens.median(dim=-1, keepdim=True).values
    return (tokens > multiple * median).float().mean(-1)


def largest_over_median(norms: Tensor) -> Tensor:
    """The largest norm of an image's tokens over their median: norms [..., h, w] → [...]."""
    tokens = norms.flatten(-2)
    return tokens.amax(-1) / tokens.median(dim=-1).values
