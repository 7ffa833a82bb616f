"""One map: the tokens of a plain backbone as they are."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.dense.plain_encoder import as_encoder
from vision_ttt.models.overlapping_patches import OverlappingPatchEmbed
from vision_ttt.models.registry import create_model


class TokenMap(nn.Module):
    """Images [B, 3, H, W] → one map [B, D, ⌈H / p⌉, ⌈W / p⌉] of a plain backbone's tokens.

    The tokens are those that the classifier pools, after the final norm. Nothing is added to the
    backbone: what a head on this map knows, the backbone has found out. Images are padded with
    zeros, right and bottom, to whole patches.

    Args:
        backbone: the name of a plain model, built with random weights, or the model itself, made
            with ``dynamic_img_size=True``. Its head is removed.

    Attributes:
        channels: (D,).
        strides: (p,), pixels along a patch's side.

    Raises:
        RuntimeError: no model has the backbone's name.
        TypeError: the backbone is not plain.
        ValueError: it accepts images of one size only, or its patches overlap or are not square.
    """

    def __init__(self, backbone: str | nn.Module) -> None:
        super().__init__()
        if isinstance(backbone, str):
            backbone = create_model(backbone, num_classes=0, dynamic_img_size=True)
        as_encoder(backbone)
        name = type(backbone).__name__
        if not backbone.dynamic_img_size:
            raise ValueError(
                f"this {name} accepts images of one size; make it with dynamic_img_size=True"
            )
        if isinstance(backbone.patch_embed, OverlappingPatchEmbed):
            raise ValueError(f"this {name}'s patches overlap; make it without stride")
        height, width = backbone.patch_embed.patch_size
        if height != width:
            raise ValueError(f"this {name}'s patches are {height} × {width}; they must be square")
        self.last = len(backbone.blocks) - 1
        backbone.reset_classifier(0)
        self.backbone = backbone
        self.channels = (backbone.embed_dim,)
        self.strides = (int(height),)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade compute for memory: keep only the inputs of the backbone's blocks."""
        self.backbone.set_grad_checkpointing(enable)

    def forward(self, images: Tensor) -> list[Tensor]:
        """The map, alone in a list."""
        (stride,) = self.strides
        down, across = (-side % stride for side in images.shape[-2:])
        if down or across:
            images = F.pad(images, (0, across, 0, down))
        return self.backbone.forward_intermediates(
            images, indices=[self.last], norm=True, output_fmt="NCHW", intermediates_only=True
        )
