"""Models of timm's registry and their weights, with errors that name what does not fit."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vision_ttt.engine.config import ConfigError
from vision_ttt.errors import reason_of, some
from vision_ttt.models.number_kinds import of_another_kind
from vision_ttt.models.registry import FACTORY_ARGUMENTS, create_model, is_model, suggested_models
from vision_ttt.pretrained import list_pretrained


def build_model(name: str, model_args: Mapping[str, Any]) -> nn.Module:
    """Build timm's model `name` with constructor arguments `model_args`, randomly initialised.

    Raises:
        ConfigError: unknown model (with the nearest known), the name of weights, or arguments it
            does not accept.
    """
    if not is_model(name):
        raise ConfigError(f"unknown model {name!r}; {suggested_models(name)}")
    if name in list_pretrained():
        raise ConfigError(
            f"{name} names weights; the model is {name.partition('.')[0]}, and it starts from them"
            f" by --initial-weights {name}"
        )
    reserved = sorted(FACTORY_ARGUMENTS & set(model_args))
    if reserved:
        raise ConfigError(
            f"model.arguments may not hold {', '.join(reserved)}; weights come by initial_weights"
        )
    try:
        return create_model(name, **model_args)
    # Constructors of timm's many models raise anything on arguments that they do not check.
    except Exception as error:
        raise ConfigError(
            f"model {name} cannot be built with {dict(model_args)}: {reason_of(error)}"
        ) from error


def describe_model(name: str, arguments: Mapping[str, Any]) -> str:
    """Name a model with those constructor arguments that were chosen for it.

    Left out are those that follow from the data: how many outputs and channels, which size.
    """
    follows = {"num_classes", "in_chans", "img_size"}
    chosen = [f"{key} {value}" for key, value in arguments.items() if key not in follows]
    return f"{name} with {', '.join(chosen)}" if chosen else name


def load_weights(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    source: Path | str,
    *,
    skip: Collection[str] = (),
) -> list[str]:
    """Copy `weights` into `model`; every name and shape must fit, and the kind of numbers.

    One value is enough for a tensor that the model has under several names; safetensors files of
    other programs have only one.

    Args:
        skip: modules that keep the model's own values where shapes differ or are absent (the
            classifier, when fine-tuning).

    Returns:
        The names of the tensors that kept them.

    Raises:
        ConfigError: the weights are another model's; lists what is missing, left over, misshapen,
            or of another kind of numbers, or names a tensor of the model that has two values.
    """
    own = model.state_dict()
    weights = _under_every_name(weights, own, source)

    def skipped(key: str) -> bool:
        return key.startswith(tuple(f"{module}." for module in skip))

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
            f"{source} does not fit {type(model).__name__}: missing {some(missing)};"
            f" unexpected {some(left_over)}; of another shape {some(misshapen)}"
        )
    if others := of_another_kind(fitting, own):
        raise ConfigError(
            f"{source} has tensors whose kind of numbers differs from the model's: {some(others)}"
        )
    model.load_state_dict(fitting, strict=not skip)
    return [key for key in own if key not in fitting]


def _under_every_name(
    weights: Mapping[str, Tensor], own: Mapping[str, Tensor], source: Path | str
) -> dict[str, Tensor]:
    """The weights, with a tensor that the model has under several names under each of them."""
    names_of: dict[tuple[int, torch.Size], list[str]] = {}
    for key, value in own.items():
        if value.data_ptr():  # neither empty nor without memory, as on meta
            names_of.setdefault((value.data_ptr(), value.shape), []).append(key)
    completed = dict(weights)
    for names in names_of.values():
        there = [key for key in names if key in weights]
        for key in there[1:]:
            if not torch.equal(weights[key], weights[there[0]]):
                raise ConfigError(f"{source} has two values of {there[0]}, the other as {key}")
        completed |= {key: weights[there[0]] for key in names if there}
    return completed
