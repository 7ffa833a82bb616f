"""Model families, one file each. Importing this package registers them with timm."""

from vision_ttt.models import vittt_ablations
from vision_ttt.models.vittt import (
    Vittt,
    vittt_base_patch16_224,
    vittt_nano_patch4_32,
    vittt_small_patch16_224,
    vittt_tiny_patch16_224,
)

__all__ = [
    "Vittt",
    "vittt_base_patch16_224",
    "vittt_nano_patch4_32",
    "vittt_small_patch16_224",
    "vittt_tiny_patch16_224",
    "vittt_ablations",
]
