"""Classification of images: cross-entropy, mixing, self-distillation, accuracy."""

from vision_ttt.tasks.classification.config import ClassificationSection

__all__ = ["ClassificationSection"]
