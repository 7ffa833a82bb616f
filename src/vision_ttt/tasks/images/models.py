"""A model's arguments that follow from its images, and whether it accepts them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.data import resolve_data_config
from torch import Tensor, nn

from vision_ttt.engine.config import ConfigError
from vision_ttt.models.registry import is_model, model_config

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
    model: nn.Module, image_size: int | None = None, crop_fraction: float | None = None
) -> dict[str, Any]:
    """Return timm's data config of a model: input_size, mean, std, interpolation, crop_pct, ….

    `image_size` in pixels and `crop_fraction` replace the model's own where given.
    """
    own = {}
    if image_size is not None:
        own["input_size"] = (3, image_size, image_size)
    if crop_fraction is not None:
        own["crop_pct"] = crop_fraction
    return resolve_data_config(own, model=model)


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
            f" (image_size): {' '.join(str(error).split())}"
        ) from error
    finally:
        model.train(was_training)


def input_statistics(name: str) -> dict[str, tuple[float, ...]]:
    """Return mean and standard deviation of the colours that a backbone expects, by channel."""
    config = model_config(name)
    return {"mean": tuple(config.mean), "std": tuple(config.std)}


def normalise(image: Tensor, statistics: Mapping[str, Sequence[float]]) -> Tensor:
    """Return an image [3, H, W] of uint8 or of floats from 0 to 1 as the backbone expects it."""
    scaled = image.float() / 255 if not image.is_floating_point() else image
    mean, std = (scaled.new_tensor(statistics[key])[:, None, None] for key in ("mean", "std"))
    return (scaled - mean) / std
