"""Detection and instance segmentation: boxes and masks of objects, average precision."""

from vision_ttt.tasks.detection.config import DetectionData, DetectionSection

__all__ = ["DetectionData", "DetectionSection"]
