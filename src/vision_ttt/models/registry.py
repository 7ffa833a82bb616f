"""Every model of this package by its name, also those that are no business of timm's registry.

Whoever goes through ``timm.list_models()`` expects classifiers of images: ``num_features``,
``forward_features``, one argument. Models that denoise are not, and are known by name here only.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any

import timm
from timm.models import PretrainedCfg, get_pretrained_cfg
from torch import nn

_PACKAGE = __name__.partition(".")[0]

_denoisers: dict[str, tuple[Callable[..., nn.Module], PretrainedCfg]] = {}


def register_denoiser(
    config: PretrainedCfg,
) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    """Let :func:`create_model` know a function by its own name, timm's registry not.

    Args:
        config: timm's description of the model's input and weights.
    """

    def register(entrypoint: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        _denoisers[entrypoint.__name__] = entrypoint, config
        return entrypoint

    return register


def list_models(pattern: str = "*") -> list[str]:
    """Names of this package's models that match a pattern with * and ?, in order."""
    classifiers = [
        name
        for name in timm.list_models()
        if timm.model_entrypoint(name).__module__.startswith(f"{_PACKAGE}.")
    ]
    return fnmatch.filter(sorted([*classifiers, *_denoisers]), pattern)


def is_model(name: str) -> bool:
    """Whether :func:`create_model` makes one of this name, ours or timm's."""
    return name in _denoisers or timm.is_model(name)


def model_entrypoint(name: str) -> Callable[..., nn.Module]:
    """The function that makes a model of ours or timm's.

    Raises:
        RuntimeError: there is none of this name.
    """
    return _denoisers[name][0] if name in _denoisers else timm.model_entrypoint(name)


def model_config(name: str) -> PretrainedCfg | None:
    """timm's description of the input and weights of a model of ours or timm's, if it has one."""
    return _denoisers[name][1] if name in _denoisers else get_pretrained_cfg(name)


def create_model(name: str, pretrained: bool = False, **arguments: Any) -> nn.Module:
    """``timm.create_model`` for every model of ours and timm's.

    Args:
        name: see :func:`list_models`, or anything that timm takes, ``local-dir:FOLDER`` for one.
        pretrained: load the weights that ``pretrained_cfg_overlay`` names.
        arguments: constructor arguments, and what timm takes besides; None for a default.

    Raises:
        RuntimeError: there is no such model.
        TypeError, ValueError: an argument is unknown or out of its range.
    """
    if name not in _denoisers:
        return timm.create_model(name, pretrained, **arguments)
    given = {key: value for key, value in arguments.items() if value is not None}
    return model_entrypoint(name)(pretrained, **given)
