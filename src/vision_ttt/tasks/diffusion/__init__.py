"""Diffusion models of images: their training objective, samples as their report."""

from vision_ttt.tasks.diffusion.config import DiffusionSection

__all__ = ["DiffusionSection"]
