"""Runs models on whole pictures of any size, exactly and in bounded memory, without tiles."""

from vision_ttt.whole.model import WholePictures
from vision_ttt.whole.pictures import ArrayPicture, Normalisation, TensorPicture
from vision_ttt.whole.plan import Plan

__all__ = ["ArrayPicture", "Normalisation", "Plan", "TensorPicture", "WholePictures"]
