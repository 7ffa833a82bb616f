"""What a file says of its model: JSON that anybody may have written, checked by type and range."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from vision_ttt.engine import section
from vision_ttt.engine.section import ConfigError, Range

DEEPEST = 64
"""Lists and mappings within each other; a recipe has a handful."""


def read_json(text: str | bytes) -> Any:
    """Return what a JSON text holds.

    Raises:
        ValueError: it is no JSON, or nested deeper than `DEEPEST`.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for each in level for inner in _inside(each)]
        if not level:
            return value
    raise ValueError(f"it is nested deeper than {DEEPEST} levels")


def check_number(name: str, value: Any, accepted: Range, *, whole: bool = False) -> None:
    """Raise ValueError or TypeError unless a value is a number of a range."""
    try:
        section.check_number(name, value, accepted, whole=whole)
    except ConfigError as error:  # it is no field of a config
        raise ValueError(str(error)) from error


def check_texts(name: str, value: Any, count: int) -> None:
    """Raise ValueError or TypeError unless a value is a list of `count` texts."""
    _check_list(name, value, count, "texts", lambda each: isinstance(each, str))


def check_whole_numbers(name: str, value: Any, count: int) -> None:
    """Raise ValueError or TypeError unless a value is a list of `count` whole numbers."""
    _check_list(name, value, count, "whole numbers", lambda each: type(each) is int)


def check_numbers(name: str, value: Any, count: int, accepted: Range) -> None:
    """Raise ValueError or TypeError unless a value is a list of `count` numbers of a range."""
    _check_list(name, value, count, "numbers", lambda each: type(each) in (int, float))
    for place, each in enumerate(value):
        check_number(f"{name}[{place}]", each, accepted)


def _check_list(
    name: str, value: Any, count: int, kind: str, is_one: Callable[[Any], bool]
) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(map(is_one, value)):
        raise TypeError(f"{name} is {value!r}; a list of {kind} is needed")
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries; {count} are needed")


def _inside(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()
