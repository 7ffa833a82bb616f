"""Semantic segmentation: pixels in classes, cross-entropy, mean intersection over union."""
