"""Semantic segmentation: each pixel's class by cross-entropy, mean intersection over union."""

from vision_ttt.tasks.segmentation.config import LabelledSet, SegmentationSection, register_root

__all__ = ["LabelledSet", "SegmentationSection", "register_root"]
