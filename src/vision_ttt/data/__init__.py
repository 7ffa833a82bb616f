"""Datasets and loading that timm and torchvision do not already give."""

from vision_ttt.data.digits import Digits
from vision_ttt.data.images import ImageError, find_images, open_image
from vision_ttt.data.loading import (
    BadImage,
    EpochOrder,
    StreamedImages,
    TransformedImages,
    evaluation_transform,
    make_loader,
    train_transform,
    with_transform,
)
from vision_ttt.data.sources import DatasetError, DatasetSpec, ImageSplits, open_dataset

__all__ = [
    "open_dataset",
    "DatasetSpec",
    "ImageSplits",
    "DatasetError",
    "Digits",
    "open_image",
    "find_images",
    "ImageError",
    "TransformedImages",
    "StreamedImages",
    "with_transform",
    "BadImage",
    "EpochOrder",
    "make_loader",
    "train_transform",
    "evaluation_transform",
]
