"""A model's arguments and input that follow from its images, and what checkpoints say of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from timm.data import resolve_data_config
from timm.layers import to_2tuple
from torch import Tensor, nn

from vision_ttt.engine.building import build_model
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.engine.config import ConfigError
from vision_ttt.engine.described import (
    check_number,
    check_numbers,
    check_texts,
    check_whole_numbers,
)
from vision_ttt.engine.section import FRACTION, Range, Section
from vision_ttt.errors import UserError, reason_of, some
from vision_ttt.models.plain_backbone import PlainBackbone
from vision_ttt.models.registry import is_model, model_config

if TYPE_CHECKING:
    from vision_ttt.data import Sequences

_Data = TypeVar("_Data", bound=Section)
SIDE = Range(1, 16_384, "from 1 to 16,384")
"""Pixels; beyond it metadata is damaged rather than ambitious."""
TOKENS = Range(1, 65_536, "from 1 to 65,536")
_MOST_PIXELS = 100_000_000  # of an image before the crop; Pillow makes none of twice as many
_LEVEL = Range(-1e6, 1e6, "from -1,000,000 to 1,000,000")
_DEVIATION = Range(1e-6, 1e6, "from 0.000001 to 1,000,000")
_WORDS = {
    "interpolation": ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"),
    "crop_mode": ("center", "squash", "border"),
}
"""What timm's transforms accept."""
_ELSEWHERE = {
    "num_classes": "the dataset gives it",
    "in_chans": "images are RGB",
    "img_size": "set data.image_size",
    "drop_path_rate": "set model.drop_path",
}


def model_arguments(
    name: str,
    *,
    num_classes: int,
    image_size: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the constructor arguments of a model for RGB images.

    `img_size` is among them where one is asked for and the model's weights depend on it.

    Raises:
        ConfigError: `extra` holds an argument that the dataset or another field decides.
    """
    for key in extra or {}:
        if key in _ELSEWHERE:
            raise ConfigError(f"model.arguments may not hold {key}; {_ELSEWHERE[key]}")
    arguments: dict[str, Any] = {"num_classes": num_classes, "in_chans": 3}
    if image_size is not None and is_model(name):
        config = model_config(name)
        if config is None or config.fixed_input_size:
            arguments["img_size"] = image_size
    return {**arguments, **(extra or {})}


def data_config(
    model: nn.Module,
    image_size: int | tuple[int, int] | None = None,
    crop_fraction: float | None = None,
) -> dict[str, Any]:
    """Return timm's data config of a model: input_size, mean, std, interpolation, crop_pct, ….

    `image_size` in pixels, of both sides or (height, width), and `crop_fraction` replace the
    model's own where given.
    """
    own = {}
    if image_size is not None:
        own["input_size"] = (3, *to_2tuple(image_size))
    if crop_fraction is not None:
        own["crop_pct"] = crop_fraction
    return resolve_data_config(own, model=model)


def patch_of(model: nn.Module) -> tuple[int, int]:
    """Return the patch of a model that takes images of any proportions as patches.

    Raises:
        ConfigError: it takes none, or was made to leave patches out or for one size.
    """
    patch = model.patch_embed.patch_size if isinstance(model, PlainBackbone) else None
    if patch is None or tuple(model.patch_embed.proj.stride) != tuple(patch):
        raise ConfigError(
            f"naflex is given, but {type(model).__name__} takes no images of any proportions;"
            " accepted are Vittt, ViT3, Vim, MambaReg, VRWKV and LinearViT, without a stride"
        )
    if model.patch_drop_rate:
        raise ConfigError(f"patch_drop_rate is {model.patch_drop_rate}; it must be 0 with naflex")
    if not model.dynamic_img_size:
        raise ConfigError("dynamic_img_size is false; it must be true with naflex")
    return tuple(patch)


def carried_sequences(carried: Mapping[str, Any]) -> Sequences | None:
    """Return how a checkpoint's images become sequences; None where they are of one size.

    Raises:
        UserError: what it carries is damaged.
    """
    given = carried.get("sequences")
    if given is None:
        return None
    try:
        check_number("tokens", given["tokens"], TOKENS, whole=True)
        check_whole_numbers("patch", given["patch"], 2)
        for side in given["patch"]:
            check_number("patch", side, SIDE, whole=True)
        tokens, (height, width) = given["tokens"], given["patch"]
        if tokens * height * width > _MOST_PIXELS:
            raise ValueError(f"{tokens} patches of {height} × {width} are over {_MOST_PIXELS:,}")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the checkpoint's sequences are damaged: {error}") from error

    from vision_ttt.data import Sequences  # which needs [train]; the rest of this module does not

    return Sequences(tokens, (height, width))


def check_accepts(model: nn.Module, images: Tensor) -> None:
    """Check that a model, in whatever mode, accepts images [B, C, H, W].

    Raises:
        ConfigError: it does not.
    """
    was_training = model.training
    model.eval()
    inputs = model.example_inputs(images) if hasattr(model, "example_inputs") else (images,)
    try:
        with torch.no_grad():
            model(*inputs)
    # Models that do not check their input fail somewhere inside, with any exception.
    except Exception as error:
        height, width = images.shape[-2:]
        raise ConfigError(
            f"{type(model).__name__} cannot take images of {height} × {width} pixels"
            f" (image_size): {reason_of(error)}"
        ) from error
    finally:
        model.train(was_training)


def input_statistics(backbone: nn.Module) -> dict[str, tuple[float, ...]]:
    """Return mean and standard deviation of the colours that a backbone expects, by channel."""
    config = data_config(backbone)
    return {key: tuple(config[key]) for key in ("mean", "std")}


def normalise(image: Tensor, statistics: Mapping[str, Sequence[float]]) -> Tensor:
    """Return an image [3, H, W] of uint8 or of floats from 0 to 1 as the backbone expects it."""
    scaled = image.float() / 255 if not image.is_floating_point() else image
    mean, std = (scaled.new_tensor(statistics[key])[:, None, None] for key in ("mean", "std"))
    return (scaled - mean) / std


def denormalise(images: Tensor, statistics: Mapping[str, Sequence[float]]) -> Tensor:
    """Undo :func:`normalise`: images [..., 3, H, W] → their colours from 0 to 1."""
    mean, std = (images.new_tensor(statistics[key])[:, None, None] for key in ("mean", "std"))
    return (images * std + mean).clamp(0, 1)


def _check_carried(metadata: ModelMetadata) -> dict[str, Any]:
    carried = metadata.carried
    check_texts("classes", carried["classes"], metadata.model_args["num_classes"])
    values = carried["input"]
    size = values["input_size"]
    check_whole_numbers("input_size", size, 3)
    for place, side in enumerate(size):
        check_number(f"input_size[{place}]", side, SIDE, whole=True)
    check_statistics(values, size[0])
    for name, accepted in _WORDS.items():
        if values[name] not in accepted:
            raise ValueError(f"{name} is {values[name]!r}; accepted are {', '.join(accepted)}")
    check_number("crop_pct", values["crop_pct"], FRACTION)
    if size[1] * size[2] / values["crop_pct"] ** 2 > _MOST_PIXELS:
        raise ValueError(
            f"crop_pct is {values['crop_pct']}; images of {size[1]} × {size[2]} pixels would be"
            f" cut from ones of more than {_MOST_PIXELS:,}"
        )
    return carried


def check_statistics(given: Mapping[str, Any], channels: int = 3) -> None:
    """Check the mean and the standard deviation of the colours.

    Raises:
        ValueError, TypeError, KeyError: they are not those of so many channels.
    """
    check_numbers("mean", given["mean"], channels, _LEVEL)
    check_numbers("std", given["std"], channels, _DEVIATION)


def check_classes(metadata: ModelMetadata, classes: Sequence[str]) -> None:
    """Raise UserError unless a checkpoint's classes are those of the data."""
    known = metadata.carried["classes"]
    if list(known) != list(classes):
        differing = sorted(set(known) ^ set(classes)) or ["their order"]
        raise UserError(
            f"the checkpoint has {len(known)} classes and the dataset {len(classes)}; they differ"
            f" in {some(differing)}"
        )


def rebuild(
    metadata: ModelMetadata,
    build: Callable[[str, Mapping[str, Any]], nn.Module] = build_model,
) -> nn.Module:
    """Build the model that a checkpoint describes, randomly initialised, by its task's `build`.

    Raises:
        ValueError, TypeError, KeyError: the description is damaged.
    """
    carried = _check_carried(metadata)
    model = build(metadata.model, metadata.model_args)
    size = list(carried["input"]["input_size"])
    # Its usual size needs no look.
    if "img_size" in metadata.model_args or list(data_config(model)["input_size"]) != size:
        check_accepts(model, torch.zeros(1, *size))
    return model


def described_data(kind: type[_Data], data: Mapping[str, Any], *, root: str) -> _Data:
    """Return the section `data` that a checkpoint describes.

    Args:
        root: the field that says where the data are.

    Raises:
        UserError: that field is missing, or there is one that the section does not have.
    """
    if root not in data:
        raise UserError("the checkpoint does not name its dataset; give --dataset")
    try:
        return kind(**data)
    except TypeError as error:  # of another version, or damaged
        raise UserError(f"the checkpoint's data: {error}; give --dataset") from error
