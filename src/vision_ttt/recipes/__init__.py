"""Published training runs as flat YAML files of `vision_ttt.engine.TrainConfig`'s fields."""

import importlib.resources
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from vision_ttt.engine.config import FIELDS, ConfigError, TrainConfig
from vision_ttt.errors import nearest

__all__ = ["available", "load", "read", "resolve"]


def available() -> tuple[str, ...]:
    """Return the packaged recipes' names, sorted."""
    files = importlib.resources.files(__name__).iterdir()
    return tuple(sorted(Path(file.name).stem for file in files if file.name.endswith(".yaml")))


def read(recipe: str) -> dict[str, Any]:
    """Return the fields that a recipe sets; `recipe` is a packaged name or the path of a YAML file.

    Raises:
        ConfigError: no such packaged recipe, not a mapping, or an unknown key.
        FileNotFoundError: no such file.
    """
    is_path = recipe.endswith((".yaml", ".yml")) or "/" in recipe
    if is_path:
        if not Path(recipe).is_file():
            raise FileNotFoundError(2, "No such recipe file", recipe)
        text = Path(recipe).read_text(encoding="utf-8")
    elif recipe in available():
        resource = importlib.resources.files(__name__) / f"{recipe}.yaml"
        text = resource.read_text(encoding="utf-8")
    else:
        raise ConfigError(
            f"unknown recipe {recipe!r}; packaged are {', '.join(available())},"
            " or give the path of a .yaml file"
        )
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe {recipe} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"recipe {recipe} must map fields to values, got {type(values).__name__}")
    for key in values:
        if key not in FIELDS:
            raise ConfigError(
                f"recipe {recipe} has the unknown key {key!r}; nearest: {nearest(str(key), FIELDS)}"
            )
    return values


def resolve(values: Mapping[str, Any]) -> TrainConfig:
    """Return the run that `values` describe, defaults filled in and types checked.

    Raises:
        ConfigError: an unknown field, a wrong type or a value out of range.
    """
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TrainConfig)
    try:
        fields = parser.parse_object(dict(values)).as_dict()
    except jsonargparse.ArgumentError as error:
        raise ConfigError(" ".join(str(error).split())) from error
    return TrainConfig(**fields)


def load(recipe: str, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the run of a recipe (a packaged name or a YAML path), some fields overridden.

    Raises:
        ConfigError: unknown recipe or field, a wrong type or a value out of range.
        FileNotFoundError: no such file.
    """
    return resolve({**read(recipe), **(overrides or {})})
