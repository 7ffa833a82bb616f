"""Reading a recipe's YAML: every key counts, and nothing in it can fill the memory."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from vision_ttt.engine.section import ConfigError
from vision_ttt.file_kinds import UnreadableFile, is_text, read_regular

_LARGEST = 2**20  # bytes
_MOST_VALUES = 10_000


def read_text(path: Path) -> str:
    """Return the text of a recipe's file.

    Raises:
        ConfigError: it is no file, too large, or not UTF-8.
        FileNotFoundError: there is no such file.
    """
    try:
        return read_regular(path, _LARGEST).decode("utf-8")
    except FileNotFoundError as error:
        raise FileNotFoundError(2, "No such recipe file", str(path)) from error
    except UnreadableFile as error:
        raise ConfigError(f"recipe {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"recipe {path} is not a text in UTF-8: byte {error.start} is"
            f" {error.object[error.start]:#04x}"
        ) from error


def parse(recipe: str, text: str) -> dict[str, Any]:
    """Return the mapping that a recipe's text holds.

    Raises:
        ConfigError: it is not YAML, not a mapping, has a key twice, or holds too much.
    """
    try:
        values = yaml.load(text, _Loader)
        _check_size(recipe, values, itertools.count(1))
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # the latter e.g. of the date 2026-13-45
        raise ConfigError(f"recipe {recipe} is not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"recipe {recipe} is nested too deeply") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"recipe {recipe} must map sections to fields, got {type(values).__name__}"
        )
    return values


class _Loader(yaml.SafeLoader):
    """Refuses a key that comes twice; PyYAML would use the last one."""

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
        ConfigError: it is more than any recipe could need, or a text that cannot be written.
    """
    if next(visits) > _MOST_VALUES:
        raise ConfigError(f"recipe {recipe} holds more than {_MOST_VALUES:,} values")
    if isinstance(value, str) and not is_text(value):
        raise ConfigError(f"recipe {recipe} has {value!r}, which holds half a character")
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            _check_size(recipe, each, visits)
