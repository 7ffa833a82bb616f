"""Building models through timm's registry, with errors that name what does not fit."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from timm.data import resolve_data_config
from torch import Tensor, nn

import vision_ttt  # noqa: F401  (registers the models with timm)
from vision_ttt.engine.config import ConfigError
from vision_ttt.errors import nearest

# create_model's own arguments load files or run code, and have no place in a recipe or checkpoint.
_RESERVED = set(inspect.signature(timm.create_model).parameters) - {"kwargs"}

_ELSEWHERE = {
    "num_classes": "the dataset gives it",
    "in_chans": "images are RGB",
    "img_size": "set image_size",
    "drop_path_rate": "set drop_path",
}


def build_model(name: str, model_args: Mapping[str, Any]) -> nn.Module:
    """Build timm's model `name` with constructor arguments `model_args`, randomly initialised.

    Raises:
        ConfigError: unknown model (with the nearest known), or arguments it does not take.
    """
    if not timm.is_model(name):
        raise ConfigError(f"unknown model {name!r}; nearest: {_nearest_models(name)}")
    reserved = sorted(_RESERVED & set(model_args))
    if reserved:
        raise ConfigError(
            f"model_args may not hold {', '.join(reserved)}; weights come by initial_weights"
        )
    try:
        return timm.create_model(name, **model_args)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"model {name} cannot be built with {dict(model_args)}: {error}"
        ) from error


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
            raise ConfigError(f"model_args may not hold {key}; {_ELSEWHERE[key]}")
    arguments: dict[str, Any] = {"num_classes": num_classes, "in_chans": 3}
    if image_size is not None and timm.is_model(name):
        config = timm.models.get_pretrained_cfg(name)
        if config is None or config.fixed_input_size:
            arguments["img_size"] = image_size
    return {**arguments, **(extra or {})}


def data_config(
    model: nn.Module, image_size: int | None = None, crop_fraction: float | None = None
) -> dict[str, Any]:
    """Return timm's data config of a model: input_size, mean, std, interpolation, crop_pct, ….

    `image_size` in pixels and `crop_fraction` take the place of the model's own where given.
    """
    own = {}
    if image_size is not None:
        own["input_size"] = (3, image_size, image_size)
    if crop_fraction is not None:
        own["crop_pct"] = crop_fraction
    return resolve_data_config(own, model=model)


def load_weights(
    model: nn.Module, weights: Mapping[str, Tensor], source: Path | str, *, skip: str | None = None
) -> None:
    """Copy `weights` into `model`; every name and shape must fit.

    Args:
        skip: prefix of the names that keep the model's own values where shapes differ or are absent
            (the classifier, when fine-tuning).

    Raises:
        ConfigError: the weights are another model's; lists what is missing, left over, misshapen.
    """
    own = model.state_dict()

    def skipped(key: str) -> bool:
        return skip is not None and key.startswith(skip + ".")

    fitting = {
        key: value
        for key, value in weights.items()
        if not skipped(key) or (key in own and own[key].shape == value.shape)
    }
    missing = [key for key in own if key not in fitting and not skipped(key)]
    left_over = [key for key in fitting if key not in own]
    misshapen = [
        f"{key} {list(value.shape)} for {list(own[key].shape)}"
        for key, value in fitting.items()
        if key in own and own[key].shape != value.shape
    ]
    if missing or left_over or misshapen:
        raise ConfigError(
            f"{source} does not fit {type(model).__name__}: missing {_some(missing)};"
            f" unexpected {_some(left_over)}; of another shape {_some(misshapen)}"
        )
    model.load_state_dict(fitting, strict=skip is None)


def _some(names: list[str]) -> str:
    if not names:
        return "none"
    shown = ", ".join(names[:6])
    return f"{shown} and {len(names) - 6} more" if len(names) > 6 else shown


def _nearest_models(name: str) -> str:
    """Models that look like `name`, among those that begin as it does if there are any."""
    every = timm.list_models()
    return nearest(name, [other for other in every if other.startswith(name[:5])] or every)
