"""Published training runs as flat YAML files of `vision_ttt.engine.TrainConfig`'s fields."""

import importlib.resources
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from vision_ttt.engine.checkpoint import WEIGHTS_FILE
from vision_ttt.engine.config import FIELDS, ConfigError, TrainConfig
from vision_ttt.errors import nearest
from vision_ttt.models.vittt_ablations import ABLATIONS

__all__ = ["available", "load", "load_stages", "read", "resolve"]

STAGES = "stages"
"""The key of a recipe in several stages, beside `TrainConfig`'s fields."""


def available() -> tuple[str, ...]:
    """Return the packaged recipes' names, sorted."""
    files = importlib.resources.files(__name__).iterdir()
    return tuple(sorted(Path(file.name).stem for file in files if file.name.endswith(".yaml")))


def read(recipe: str) -> dict[str, Any]:
    """Return the fields that a recipe sets.

    Args:
        recipe: a packaged name or the path of a YAML file; with +ABLATION after a packaged name,
            one row of Vision-TTT's Tables 3 and 4 or Fig. 7, as `vision_ttt.models` names them.

    Raises:
        ConfigError: no such packaged recipe or ablation, not a mapping, or an unknown key.
        FileNotFoundError: no such file.
    """
    if recipe.endswith((".yaml", ".yml")) or "/" in recipe:
        if not Path(recipe).is_file():
            raise FileNotFoundError(2, "No such recipe file", recipe)
        return _parse(recipe, Path(recipe).read_text(encoding="utf-8"))
    name, plus, ablation = recipe.partition("+")
    if name not in available():
        raise ConfigError(
            f"unknown recipe {name!r}; packaged are {', '.join(available())},"
            " or give the path of a .yaml file"
        )
    resource = importlib.resources.files(__name__) / f"{name}.yaml"
    values = _parse(name, resource.read_text(encoding="utf-8"))
    if not plus:
        return values
    if ablation not in ABLATIONS:
        raise ConfigError(f"unknown ablation {ablation!r}; known are {', '.join(ABLATIONS)}")
    model_args = {**values.get("model_args", {}), **ABLATIONS[ablation].keywords}
    return {**values, "model_args": model_args, "output": f"{values['output']}+{ablation}"}


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
    """Return the run of a recipe (as for `read`), some fields overridden.

    Raises:
        ConfigError: unknown recipe or field, a wrong type or a value out of range; the recipe is of
            several stages.
        FileNotFoundError: no such file.
    """
    stages = load_stages(recipe, overrides)
    if len(stages) > 1:
        raise ConfigError(f"recipe {recipe} has several stages: {', '.join(stages)}")
    return next(iter(stages.values()))


def load_stages(recipe: str, overrides: Mapping[str, Any] | None = None) -> dict[str, TrainConfig]:
    """Return the runs of a recipe by the stages' names, in order; one named "" if it has none.

    A staged recipe maps `stages` to the stages' names, and each of them to the fields it sets
    beside the recipe's own. A stage's output is the sub-folder of its name, and it starts from the
    last weights of the stage before. `overrides` hold for every stage.

    Raises:
        ConfigError, FileNotFoundError: as for `load`.
    """
    values = read(recipe)
    stages = values.pop(STAGES, None)
    values |= overrides or {}
    if stages is None:
        return {"": resolve(values)}
    runs: dict[str, TrainConfig] = {}
    output = Path(values.get("output", f"runs/{recipe}"))
    start: dict[str, Any] = {}
    for name, fields in stages.items():
        run = {**values, **fields, **(overrides or {}), **start, "output": str(output / name)}
        runs[name] = resolve(run)
        start = {"initial_weights": str(output / name / WEIGHTS_FILE)}
    return runs


def _parse(recipe: str, text: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe {recipe} is not YAML: {' '.join(str(error).split())}") from error
    _check_keys(recipe, values, {*FIELDS, STAGES})
    stages = values.get(STAGES)
    if stages is not None:
        if not isinstance(stages, dict) or not stages:
            raise ConfigError(f"recipe {recipe}: {STAGES} must map names to fields")
        for name, fields in stages.items():
            _check_keys(f"{recipe}, stage {name},", fields, FIELDS)
    return values


def _check_keys(place: str, values: Any, accepted: Collection[str]) -> None:
    if not isinstance(values, dict):
        raise ConfigError(f"recipe {place} must map fields to values, got {type(values).__name__}")
    for key in values:
        if key not in accepted:
            close = nearest(str(key), accepted)
            raise ConfigError(f"recipe {place} has the unknown key {key!r}; nearest: {close}")
