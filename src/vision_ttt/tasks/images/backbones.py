"""The backbone inside a checkpoint's model, with how it is shown images, to be looked into."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import timm
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import pil_to_tensor

from vision_ttt import tasks
from vision_ttt.data import evaluation_transform
from vision_ttt.engine.building import build_model
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.engine.config import ConfigError
from vision_ttt.errors import UserError
from vision_ttt.models.image_size import size_multiple
from vision_ttt.models.registry import is_model
from vision_ttt.tasks.dense.config import DenseSection
from vision_ttt.tasks.images.models import (
    carried_sequences,
    data_config,
    denormalise,
    normalise,
)
from vision_ttt.tasks.images.pretraining import PretrainedBackbone

_STATISTICS = ("mean", "std")
_LARGEST_VIEW = 2**25
"""Pixels of a whole picture as a model sees it; a narrow one would take all memory."""


@dataclass(frozen=True)
class ImageBackbone:
    """A backbone, and how images are prepared for it."""

    model: nn.Module
    """The backbone: images [B, 3, H, W] → features or logits; in evaluation mode, on the CPU."""
    around: nn.Module
    """What runs it in the checkpoint's model on such images: the backbone itself, or a module that
    holds it and takes part in what its blocks see, such as an adapter."""
    statistics: Mapping[str, Sequence[float]]
    """`mean` and `std` of the colours, by channel."""
    prepare: Callable[[Image.Image], Tensor]
    """An RGB picture → the image [3, H, W] that the backbone is given."""

    def shown(self, image: Tensor) -> Tensor:
        """Undo the normalisation: an image [3, H, W] of `prepare` → its colours from 0 to 1."""
        return denormalise(image, self.statistics)


class ViewError(UserError, ValueError):
    """A picture of which a model's view would be too large; the message names both sizes."""


@dataclass(frozen=True)
class WholeImage:
    """Resizes a whole picture, bilinearly, so that its sides are whole patches.

    The shorter side becomes `shorter_side` pixels, or less where the longer one would exceed
    `longer_side`; then each side is rounded to the nearest multiple of the patch's. Nothing is cut
    off or padded, and proportions change by half a patch at most.
    """

    statistics: Mapping[str, Sequence[float]]
    shorter_side: int
    multiple: int
    """Pixels of a patch, or of a cell of the coarsest map."""
    longer_side: int | None = None

    def __call__(self, image: Image.Image) -> Tensor:
        """Return an RGB picture as a normalised image [3, H, W].

        Raises:
            ViewError: the image would have more than 33.6 million pixels.
        """
        scale = self.shorter_side / min(image.size)
        if self.longer_side is not None:
            scale = min(scale, self.longer_side / max(image.size))
        unit = self.multiple
        size = tuple(max(round(side * scale / unit), 1) * unit for side in image.size)
        if math.prod(size) > _LARGEST_VIEW:
            raise ViewError(
                f"a picture of {image.width} × {image.height} pixels (width × height) would be"
                f" resized to {size[0]} × {size[1]}; at most {_LARGEST_VIEW / 1e6:.1f} million"
                " pixels are accepted"
            )
        levels = pil_to_tensor(image.resize(size, Image.Resampling.BILINEAR))
        return normalise(levels, self.statistics)


def classifier_backbone(
    model: nn.Module,
    name: str,
    arguments: Mapping[str, Any],
    input_config: Mapping[str, Any],
    shorter_side: int | None,
) -> ImageBackbone:
    """The classifier itself, on images as `vision-ttt predict` prepares them, or on whole ones.

    Args:
        model: built as `name` with `arguments`, in evaluation mode.
        input_config: timm's data config of its images.
        shorter_side: see :class:`WholeImage`; None for the centre crop of the model's own size.
    """
    statistics = {key: tuple(input_config[key]) for key in _STATISTICS}
    if shorter_side is None:
        return ImageBackbone(model, model, statistics, evaluation_transform(dict(input_config)))
    model = _of_any_size(model, name, arguments)
    prepare = WholeImage(statistics, shorter_side, size_multiple(model))
    return ImageBackbone(model, model, statistics, prepare)


def checkpoint_backbone(
    model: nn.Module, metadata: ModelMetadata, *, shorter_side: int | None
) -> ImageBackbone:
    """The backbone of a checkpoint's model, as its task shows it images.

    Args:
        shorter_side: in pixels, of whole images; None: as the task shows images at test.

    Raises:
        UserError: the model has none.
    """
    carried, section = metadata.carried, tasks.find(metadata.task["name"])
    if issubclass(section, DenseSection):
        shown = {**carried, **carried["input"]}
        shorter = shown["test_shorter_side" if "test_shorter_side" in shown else "shorter_side"]
        at_test = (shorter, shown["longer_side"])
        return dense_backbone(model.maps, shown, shorter_side=shorter_side, at_test=at_test)
    if "classification" in (metadata.task["name"], *section.stands_for(metadata)):
        own = (metadata.model, metadata.model_args, carried["input"])
        found = classifier_backbone(model, *own, shorter_side)
        sequences = carried_sequences(carried)
        if sequences is None or shorter_side is not None:
            return found
        prepare = sequences.evaluation_transform(carried["input"], patchify=False)
        return replace(found, prepare=prepare)
    if isinstance(model, PretrainedBackbone):
        backbone = model.backbone
        backbone.mask_token = None  # of masked images; no image that is looked at has a mask
        arguments = {**metadata.model_args, "num_classes": backbone.num_classes}
        return classifier_backbone(
            backbone, metadata.model, arguments, carried["input"], shorter_side
        )
    raise UserError(f"the checkpoint holds {section.HOLDS}; it has no image backbone to explain")


def named_backbone(
    name: str, shorter_side: int | None, arguments: Mapping[str, Any] | None = None
) -> ImageBackbone:
    """A model of this package or of timm with random weights, drawn from torch's generator.

    Args:
        shorter_side: as for :func:`classifier_backbone`.
        arguments: of the model's constructor; an `img_size` is that of the images, too.

    Raises:
        ConfigError: there is no such model (names the nearest), it does not accept the arguments,
            or it is no backbone of images.
    """
    arguments = {} if arguments is None else arguments
    if is_model(name) and not timm.is_model(name):  # timm's registry holds no denoisers
        raise ConfigError(f"{name} is a denoising model, not a backbone of images")
    model = build_model(name, arguments).eval()
    input_config = data_config(model, arguments.get("img_size"))
    return classifier_backbone(model, name, arguments, input_config, shorter_side)


def dense_backbone(
    maps: nn.Module,
    statistics: Mapping[str, Any],
    *,
    shorter_side: int | None,
    at_test: tuple[int, int],
) -> ImageBackbone:
    """A detector's or segmenter's backbone, with the map module around it, on whole images.

    Args:
        maps: see :class:`vision_ttt.dense.DenseModel`.
        statistics: with `mean` and `std` of the colours.
        shorter_side: see :class:`WholeImage`; None for the sizes at test.
        at_test: shorter side, and what the longer side has at most, of images at test.
    """
    statistics = {key: tuple(statistics[key]) for key in _STATISTICS}
    shorter, longer = at_test if shorter_side is None else (shorter_side, None)
    # Images that are whole cells of the coarsest map, which an adapter does not pad.
    unit = math.lcm(size_multiple(maps.backbone), max(maps.strides))
    prepare = WholeImage(statistics, shorter, unit, longer)
    return ImageBackbone(maps.backbone, maps, statistics, prepare)


def _of_any_size(model: nn.Module, name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """The model, or where its weights are for one size, one that interpolates its positions."""
    try:
        other = build_model(name, {**arguments, "dynamic_img_size": True})
    except ConfigError:  # it has no such argument: as a convolutional model, of any size already
        return model
    other.load_state_dict(model.state_dict())
    return other.eval()
