"""Distillation: a student learns the features or the logits of a teacher, without labels."""

from vision_ttt.tasks.distill.config import DistillSection

__all__ = ["DistillSection"]
