"""Pre-training without labels: a backbone fills in masked patches (SimMIM)."""

from vision_ttt.tasks.masked_images.config import MaskedImagesSection

__all__ = ["MaskedImagesSection"]
