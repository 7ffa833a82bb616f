"""Datasets and loading that timm and torchvision do not already give."""

from vision_ttt.extras import require

require("train", "vision_ttt.data")

from vision_ttt.data.digits import Digits
from vision_ttt.data.images import ImageError, open_image
from vision_ttt.data.loading import (
    LoaderError,
    SeededItems,
    collate,
    evaluation_transform,
    make_loader,
    train_transform,
    watched,
    with_transform,
)
from vision_ttt.data.naflex import Sequences, collate_sequences, stack_sequences
from vision_ttt.data.order import EpochOrder, EvenOrder, Share
from vision_ttt.data.sources import (
    DatasetError,
    DatasetSpec,
    ImageSplits,
    open_dataset,
    targets_of,
)

__all__ = [
    "open_dataset",
    "targets_of",
    "DatasetSpec",
    "ImageSplits",
    "DatasetError",
    "Digits",
    "open_image",
    "ImageError",
    "SeededItems",
    "with_transform",
    "EpochOrder",
    "EvenOrder",
    "Share",
    "collate",
    "Sequences",
    "collate_sequences",
    "stack_sequences",
    "make_loader",
    "watched",
    "LoaderError",
    "train_transform",
    "evaluation_transform",
]
