"""Four maps of a backbone whose stages have the strides 4, 8, 16 and 32."""

from __future__ import annotations

from timm.layers import LayerNorm2d
from torch import Tensor, nn

from vision_ttt.dense.plain_encoder import STRIDES
from vision_ttt.models.registry import create_model


class StageMaps(nn.Module):
    """Images [B, C, H, W] → maps [B, C_i, H / s_i, W / s_i] of strides 4, 8, 16 and 32.

    A map is the output of the last stage of its stride, for H-ViT³ followed by a LayerNorm over
    channels, one per map, as in the authors' detection and segmentation models. The classifier's
    final norm and head, and layers after the last map, are removed.

    Args:
        backbone: the name of a model of timm's registry, built with random weights, or such a
            model, which is changed. Its parameters keep the names they have in the classifier.
        norms: a LayerNorm per map; None for what the backbone's attribute
            ``maps_need_norms`` says (H-ViT³ has it; without the attribute there are none).

    Attributes:
        channels: C_i.
        strides: (4, 8, 16, 32).

    Raises:
        ValueError: the backbone gives no maps, or none of one of the four strides.
        RuntimeError: no model has the backbone's name.
    """

    strides = STRIDES

    def __init__(self, backbone: str | nn.Module, *, norms: bool | None = None) -> None:
        super().__init__()
        if isinstance(backbone, str):
            backbone = create_model(backbone, num_classes=0)
        stages = _last_of_each_stride(backbone)
        self.channels = tuple(backbone.feature_info[stage]["num_chs"] for stage in stages)
        self.indices = backbone.prune_intermediate_layers(stages, prune_norm=True, prune_head=True)
        self.backbone = backbone
        if norms is None:
            norms = getattr(backbone, "maps_need_norms", False)
        # The eps is that of H-ViT³'s release.
        self.norms = nn.ModuleList(
            LayerNorm2d(channels, eps=1e-5) if norms else nn.Identity()
            for channels in self.channels
        )

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade compute for memory: keep only the inputs of the backbone's blocks."""
        self.backbone.set_grad_checkpointing(enable)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Four maps, finest first."""
        maps = self.backbone.forward_intermediates(
            images, indices=self.indices, output_fmt="NCHW", intermediates_only=True
        )
        return [norm(x) for norm, x in zip(self.norms, maps, strict=True)]


def _last_of_each_stride(backbone: nn.Module) -> list[int]:
    name = type(backbone).__name__
    if not hasattr(backbone, "forward_intermediates") or not hasattr(backbone, "feature_info"):
        raise ValueError(f"{name} gives no maps of its stages (forward_intermediates)")
    reductions = [info["reduction"] for info in backbone.feature_info]
    missing = [stride for stride in STRIDES if stride not in reductions]
    if missing:
        raise ValueError(
            f"{name} has no maps of stride {', '.join(map(str, missing))}, its strides are"
            f" {', '.join(map(str, dict.fromkeys(reductions)))}; a plain backbone gets maps of"
            " other strides by an adapter"
        )
    last = {reduction: index for index, reduction in enumerate(reductions)}
    return [last[stride] for stride in STRIDES]
