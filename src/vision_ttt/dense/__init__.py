"""Dense prediction: maps of several resolutions from a backbone, and the heads that use them."""

from typing import TYPE_CHECKING

from vision_ttt._late import offer_late

if TYPE_CHECKING:
    from vision_ttt.dense.backbone_weights import BackboneLoad, load_backbone
    from vision_ttt.dense.vit_adapter import ViTAdapter

__all__ = ["BackboneLoad", "ViTAdapter", "load_backbone"]

offer_late(
    __name__,
    {
        "BackboneLoad": "backbone_weights",
        "load_backbone": "backbone_weights",
        "ViTAdapter": "vit_adapter",
    },
)
