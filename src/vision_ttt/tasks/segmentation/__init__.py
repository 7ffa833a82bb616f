"""Semantic segmentation: each pixel's class by cross-entropy, mean intersection over union."""

from vision_ttt.tasks.segmentation.config import SegmentationSection

__all__ = ["SegmentationSection"]
