"""Published training runs as flat YAML files of `vision_ttt.engine.TrainConfig`'s fields."""

import importlib.resources
import itertools
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from vision_ttt.extras import require

require("train", "vision_ttt.recipes")

import jsonargparse
import yaml

from vision_ttt.engine.config import FIELDS, ConfigError, TrainConfig
from vision_ttt.errors import nearest

__all__ = ["available", "load", "load_stages", "merge", "read", "resolve"]

_LOGGER = logging.getLogger(__name__)

STAGES = "stages"
"""The key of a recipe in several stages, beside `TrainConfig`'s fields."""
_MOST_VALUES = 10_000


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
        ConfigError: no such packaged recipe or ablation, not UTF-8, not a mapping, or an unknown
            key.
        FileNotFoundError: no such file.
    """
    if recipe.endswith((".yaml", ".yml")) or "/" in recipe:
        if not Path(recipe).is_file():
            raise FileNotFoundError(2, "No such recipe file", recipe)
        return _parse(recipe, _read_text(Path(recipe)))
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
    from vision_ttt.models.vittt_ablations import ABLATIONS  # with PyTorch

    if ablation not in ABLATIONS:
        raise ConfigError(f"unknown ablation {ablation!r}; known are {', '.join(ABLATIONS)}")
    own = {"model_args": ABLATIONS[ablation].keywords, "output": f"{values['output']}+{ablation}"}
    return merge(values, own)


def resolve(values: Mapping[str, Any]) -> TrainConfig:
    """Return the run that `values` describe, defaults filled in and types checked.

    Raises:
        ConfigError: an unknown field, a wrong type or a value out of range.
    """
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TrainConfig)
    try:
        return TrainConfig(**parser.parse_object(dict(values)).as_dict())
    except (jsonargparse.ArgumentError, TypeError) as error:
        raise ConfigError(" ".join(str(error).split())) from error


def load(recipe: str, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the run of a recipe (as for `read`), some fields overridden; see `load_stages`.

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
    last weights of the stage before.

    `overrides` hold for every stage. Those of `model_args` add to the recipe's key by key, and null
    takes a key away. `epochs` fewer than the recipe's take its warm-ups with them, in proportion,
    unless these are overridden, too; that is logged.

    Raises:
        ConfigError, FileNotFoundError: as for `load`.
    """
    values = read(recipe)
    stages = values.pop(STAGES, None)
    overrides = overrides or {}
    if stages is None:
        return {"": resolve(_overridden(values, overrides))}
    from vision_ttt.engine.checkpoint import WEIGHTS_FILE  # with PyTorch

    runs: dict[str, TrainConfig] = {}
    output = Path(str({**values, **overrides}.get("output", f"runs/{recipe}")))
    start: dict[str, Any] = {}
    for name, fields in stages.items():
        run = _overridden(merge(values, fields), overrides)
        runs[name] = resolve({**run, **start, "output": str(output / name)})
        start = {"initial_weights": str(output / name / WEIGHTS_FILE)}
    return runs


def _overridden(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The fields `values` with `overrides`, and the warm-ups that fit fewer epochs."""
    merged = merge(values, overrides)
    own, asked = (each.get("epochs", TrainConfig.epochs) for each in (values, merged))
    if "epochs" not in overrides or not _are_numbers(own, asked) or not 1 <= asked < own:
        return merged
    for name in ("warmup_epochs", "inner_warmup_epochs"):
        former = values.get(name, getattr(TrainConfig, name))
        if name not in overrides and _are_numbers(former) and former:
            merged[name] = round(former * asked / own, 6)
            _LOGGER.info(
                "%s: %g instead of the recipe's %g, as epochs are %g instead of %g",
                *(name, merged[name], former, asked, own),
            )
    return merged


def _are_numbers(*values: Any) -> bool:
    """Whether all are; otherwise `resolve` will say what is wrong with them."""
    return all(isinstance(value, int | float) for value in values)


def merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with some changed, those of model_args key by key; None takes a key away."""
    merged = {**values, **changes}
    own, more = values.get("model_args"), changes.get("model_args")
    if isinstance(own, Mapping) and isinstance(more, Mapping):
        merged["model_args"] = {**own, **more}
    if isinstance(merged.get("model_args"), Mapping):
        known = merged["model_args"].items()
        merged["model_args"] = {name: value for name, value in known if value is not None}
    return merged


class _Loader(yaml.SafeLoader):
    """Reads YAML of which each key counts: PyYAML takes the last of two that are the same."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} comes twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _check_size(recipe: str, value: Any, visits: Iterator[int]) -> None:
    """Count what a recipe holds: YAML's aliases can make a few lines larger than any memory.

    Raises:
        ConfigError: it is more than any recipe could need.
    """
    if next(visits) > _MOST_VALUES:
        raise ConfigError(f"recipe {recipe} holds more than {_MOST_VALUES:,} values")
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            _check_size(recipe, each, visits)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"recipe {path} is not a text in UTF-8: byte {error.start} is"
            f" {error.object[error.start]:#04x}"
        ) from error


def _parse(recipe: str, text: str) -> dict[str, Any]:
    try:
        values = yaml.load(text, _Loader)
        _check_size(recipe, values, itertools.count(1))
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # the latter e.g. of the date 2026-13-45
        raise ConfigError(f"recipe {recipe} is not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"recipe {recipe} is nested too deeply; fields are flat") from error
    _check_keys(recipe, values, {*FIELDS, STAGES})
    stages = values.get(STAGES)
    if stages is not None:
        if not isinstance(stages, dict) or not stages:
            raise ConfigError(f"recipe {recipe}: {STAGES} must map names to fields")
        for name, fields in stages.items():
            if not isinstance(name, str) or Path(name).name != name:  # it names a sub-folder
                raise ConfigError(f"recipe {recipe}: {name!r} cannot be the name of a stage")
            _check_keys(f"{recipe}, stage {name},", fields, FIELDS)
    return values


def _check_keys(place: str, values: Any, accepted: Collection[str]) -> None:
    if not isinstance(values, dict):
        raise ConfigError(f"recipe {place} must map fields to values, got {type(values).__name__}")
    for key in values:
        if key not in accepted:
            close = nearest(str(key), accepted)
            raise ConfigError(f"recipe {place} has the unknown key {key!r}; nearest: {close}")
