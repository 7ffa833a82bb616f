"""Every model of this package by its name, including those that timm's registry does not hold.

Code that loops over ``timm.list_models()`` expects classifiers of images: ``num_features``,
``forward_features``, one argument. Denoising models have none of these and are not there.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable
from typing import Any

import timm
from timm.models import PretrainedCfg, get_pretrained_cfg
from torch import nn

from vision_ttt.errors import suggestions

_PACKAGE = __name__.partition(".")[0]

_denoisers: dict[str, tuple[Callable[..., nn.Module], PretrainedCfg]] = {}


def register_denoiser(
    config: PretrainedCfg,
) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    """Register a function under its own name for :func:`create_model`, but not with timm.

    Args:
        config: timm's description of the model's input and weights.
    """

    def register(entrypoint: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        _denoisers[entrypoint.__name__] = entrypoint, config
        return entrypoint

    return register


def list_models(pattern: str = "*") -> list[str]:
    """The sorted names of this package's models that match a pattern with * and ?."""
    classifiers = [
        name
        for name in timm.list_models()
        if timm.model_entrypoint(name).__module__.startswith(f"{_PACKAGE}.")
    ]
    return fnmatch.filter(sorted([*classifiers, *_denoisers]), pattern)


def is_model(name: str) -> bool:
    """Whether this package or timm has a model of this name."""
    return name in _denoisers or timm.is_model(name)


def suggested_models(name: str) -> str:
    """Return "nearest: " and models that look like ``name``, preferably those that begin alike."""
    every = sorted({*timm.list_models(), *list_models()})
    return suggestions(name, [other for other in every if other.startswith(name[:5])] or every)


def model_entrypoint(name: str) -> Callable[..., nn.Module]:
    """The function that builds a model of this package or of timm.

    Raises:
        RuntimeError: no model has this name.
    """
    return _denoisers[name][0] if name in _denoisers else timm.model_entrypoint(name)


def model_config(name: str) -> PretrainedCfg | None:
    """timm's description of the input and weights of a model, or None where it has none."""
    return _denoisers[name][1] if name in _denoisers else get_pretrained_cfg(name)


FACTORY_ARGUMENTS = frozenset(inspect.signature(timm.create_model).parameters) - {"kwargs"}
"""Arguments of timm's factory, not of a constructor: they load files or run code, and have no
place in a recipe or checkpoint."""


def create_model(name: str, pretrained: bool = False, **arguments: Any) -> nn.Module:
    """``timm.create_model`` for every model of this package and of timm.

    Args:
        name: see :func:`list_models`, or any name that timm accepts, e.g. ``local-dir:FOLDER``.
        pretrained: load the weights that ``pretrained_cfg_overlay`` names.
        arguments: the constructor's and timm's own; None for a default.

    Raises:
        RuntimeError: no model has this name.
        TypeError, ValueError: an argument is unknown or out of its range.
    """
    if name not in _denoisers:
        return timm.create_model(name, pretrained, **arguments)
    given = {key: value for key, value in arguments.items() if value is not None}
    return model_entrypoint(name)(pretrained, **given)
