"""Detectors and segmenters by their backbone's name and a mapping that JSON can hold."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from torch import nn

from vision_ttt.dense.detector import Detector
from vision_ttt.dense.model import DenseModelError
from vision_ttt.dense.plain_encoder import TokenMap
from vision_ttt.dense.pyramid_maps import PyramidMaps
from vision_ttt.dense.segmenter import LinearSegmenter, Segmenter
from vision_ttt.dense.sizes import DetectorSizes, SegmenterSizes
from vision_ttt.dense.stage_maps import StageMaps
from vision_ttt.dense.vit_adapter import ViTAdapter
from vision_ttt.errors import reason_of, suggestions
from vision_ttt.models.registry import FACTORY_ARGUMENTS, create_model, is_model, suggested_models

_Sizes = TypeVar("_Sizes", DetectorSizes, SegmenterSizes)


_MAPS: dict[str, type[nn.Module]] = {
    "adapter": ViTAdapter,
    "pyramid": PyramidMaps,
    "stages": StageMaps,
    "tokens": TokenMap,
}
_OF_ONE_MAP = "tokens"


def build_detector(
    name: str, *, num_classes: int, dense: Mapping[str, Any], **backbone_arguments: Any
) -> Detector:
    """A Mask R-CNN on a backbone of timm's registry, randomly initialised.

    Args:
        name: of the backbone.
        num_classes: of objects, without the background.
        dense: ``maps``, "adapter" (the default: a ViT-Adapter, for plain backbones), "pyramid"
            (:class:`PyramidMaps`, for plain ones, too) or "stages" (for hierarchical ones);
            ``adapter``, ``pyramid`` or ``stages``, a mapping of the class's keywords; and the
            fields of :class:`DetectorSizes`. Missing keys have published values.
        backbone_arguments: of the backbone's constructor.

    Raises:
        DenseModelError: an unknown backbone or key, with the nearest known, or a value that is not
            accepted.
    """
    sizes, rest = _sizes(DetectorSizes, dense)
    if rest.get("maps") == _OF_ONE_MAP:
        raise DenseModelError("dense.maps is 'tokens'; a detector accepts adapter, pyramid, stages")
    return _built(Detector, name, num_classes, sizes, rest, backbone_arguments)


def build_segmenter(
    name: str, *, num_classes: int, dense: Mapping[str, Any], **backbone_arguments: Any
) -> Segmenter | LinearSegmenter:
    """A UperNet, or a linear layer, on a backbone of timm's registry, randomly initialised.

    Args:
        name, backbone_arguments: as in :func:`build_detector`.
        num_classes: of pixels.
        dense: likewise, with the fields of :class:`SegmenterSizes`. ``maps`` may also be "tokens":
            a :class:`LinearSegmenter`, which has no sizes.

    Raises:
        DenseModelError: as :func:`build_detector`.
        MissingPackageError: transformers is not installed.
    """
    if isinstance(dense, Mapping) and dense.get("maps") == _OF_ONE_MAP:
        _check_keys("dense of maps 'tokens'", dense, ["maps", _OF_ONE_MAP])
        return _built(LinearSegmenter, name, num_classes, None, dense, backbone_arguments)
    sizes, rest = _sizes(SegmenterSizes, dense)
    return _built(Segmenter, name, num_classes, sizes, rest, backbone_arguments)


def _sizes(kind: type[_Sizes], dense: Mapping[str, Any]) -> tuple[_Sizes, dict[str, Any]]:
    """The sizes that ``dense`` holds, and what it holds beside them."""
    names = [field.name for field in fields(kind)]
    _check_keys("dense", dense, [*names, "maps", *_MAPS])
    try:
        sizes = kind(**{name: dense[name] for name in names if name in dense})
    except (TypeError, ValueError) as error:
        raise DenseModelError(f"dense: {error}") from error
    return sizes, {key: value for key, value in dense.items() if key not in names}


def _built(
    kind: Callable[..., Any],
    name: str,
    num_classes: int,
    sizes: Any,
    rest: Mapping[str, Any],
    backbone_arguments: Mapping[str, Any],
) -> Any:
    if not is_model(name):
        raise DenseModelError(f"unknown model {name!r}; {suggested_models(name)}")
    maps = _make_maps(name, rest, backbone_arguments)
    try:
        return kind(maps, num_classes, *([] if sizes is None else [sizes]))
    except (TypeError, ValueError) as error:
        raise DenseModelError(str(error)) from error


def _make_maps(
    name: str, rest: Mapping[str, Any], backbone_arguments: Mapping[str, Any]
) -> nn.Module:
    which = rest.get("maps", "adapter")
    if not isinstance(which, str) or which not in _MAPS:
        raise DenseModelError(f"dense.maps is {which!r}; accepted: {', '.join(_MAPS)}")
    for other in _MAPS:
        if other != which and rest.get(other):
            raise DenseModelError(f"dense.{other} is given, but dense.maps is {which!r}")
    kind = _MAPS[which]
    keywords = rest.get(which, {})
    own = [key for key in inspect.signature(kind).parameters if key != "backbone"]
    _check_keys(f"dense.{which}", keywords, own)
    reserved = sorted(FACTORY_ARGUMENTS & set(backbone_arguments))
    if reserved:
        raise DenseModelError(
            f"the backbone's arguments may not hold {', '.join(reserved)}: they are its"
            " constructor's alone, and weights are loaded afterwards"
        )
    # A plain model has positions for one image size; images of detection have many.
    any_size = {} if which == "stages" else {"dynamic_img_size": True}
    arguments = {"num_classes": 0, **any_size, **backbone_arguments}
    # Constructors of timm's many models raise anything on arguments that they do not check.
    try:
        backbone = create_model(name, **arguments)
    except Exception as error:
        raise DenseModelError(
            f"model {name} cannot be built with {arguments}: {reason_of(error)}"
        ) from error
    try:
        return kind(backbone, **keywords)
    except (TypeError, ValueError) as error:
        raise DenseModelError(
            f"dense.maps {which!r} of {name}, with {dict(keywords)}: {reason_of(error)}"
        ) from error


def _check_keys(place: str, given: Any, accepted: list[str]) -> None:
    if not isinstance(given, Mapping):
        raise DenseModelError(f"{place} is {given!r}; accepted: a mapping")
    for key in given:
        if key not in accepted:
            raise DenseModelError(f"{place} has no {key!r}; {suggestions(str(key), accepted)}")
