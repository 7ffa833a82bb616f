"""Semantic segmentation: the class of each pixel, by cross-entropy; mean intersection over union."""

from vision_ttt.tasks.segmentation.config import SegmentationSection

__all__ = ["SegmentationSection"]
