"""What the checkpoints of segmenters carry: classes, their colours, and how images are shown."""

from collections.abc import Sequence

from torch import nn

from vision_ttt.dense.building import build_segmenter
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.engine.described import check_numbers, check_texts, check_whole_numbers
from vision_ttt.engine.section import Range
from vision_ttt.tasks.images.metadata import check_statistics
from vision_ttt.tasks.segmentation.config import SegmentationData

_BYTE = Range(0, 255, "from 0 to 255")
INPUT = ("longer_side", "test_shorter_side", "evaluation", "window", "stride")
"""The fields of `SegmentationData` that say how a model sees images at test."""


def _check_carried(metadata: ModelMetadata) -> None:
    carried = metadata.carried
    check_texts("classes", carried["classes"], metadata.model_args["num_classes"])
    colours = carried["palette"]
    if not isinstance(colours, Sequence) or len(colours) != len(carried["classes"]):
        raise ValueError("palette does not have a colour for each class")
    for place, colour in enumerate(colours):
        check_whole_numbers(f"palette[{place}]", colour, 3)
        check_numbers(f"palette[{place}]", colour, 3, _BYTE)
    check_statistics(carried["input"])
    shown = {name: carried["input"][name] for name in INPUT}
    SegmentationData(**shown, shorter_side=shown["test_shorter_side"])  # checks them


def rebuild(metadata: ModelMetadata) -> nn.Module:
    """Build the model that a checkpoint describes, randomly initialised.

    Raises:
        ValueError, TypeError, KeyError: the description is damaged.
    """
    _check_carried(metadata)
    return build_segmenter(metadata.model, **metadata.model_args)
