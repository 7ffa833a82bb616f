"""Whole pictures of any size through a model, exactly, in bounded memory: no tiles, no seams."""

from vision_ttt.whole.model import WholePictures
from vision_ttt.whole.pictures import ArrayPicture, Normalisation, TensorPicture
from vision_ttt.whole.plan import Plan

__all__ = ["ArrayPicture", "Normalisation", "Plan", "TensorPicture", "WholePictures"]
