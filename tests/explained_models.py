"""Small models that explanation tools are tried on."""

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn


class ConvStack(nn.Sequential):
    """Layers of maps under timm's contract for features."""

    def forward_intermediates(
        self, x: Tensor, indices=None, output_fmt="NCHW", intermediates_only=True
    ) -> list[Tensor]:
        return [self(x)]


def small_vit(kind: type[VisionTransformer] = VisionTransformer, **options) -> VisionTransformer:
    """A vision transformer of 4 × 4 tokens whose attention is far from even."""
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    model = kind(**{**sizes, "num_classes": 5, **options})
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "attn.qkv" in name or "head" in name:
                x.normal_()
    return model
