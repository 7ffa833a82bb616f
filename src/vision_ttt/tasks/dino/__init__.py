"""Pre-training without labels: self-distillation between crops of one image (DINO)."""

from vision_ttt.tasks.dino.config import DinoSection

__all__ = ["DinoSection"]
