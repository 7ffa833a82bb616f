"""Sections of a run's config: frozen dataclasses that check every field by its type and range."""

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from vision_ttt.errors import UserError


class ConfigError(UserError, ValueError):
    """A field, recipe key or model option that is not accepted; names it and what is accepted."""


class Range(NamedTuple):
    """The numbers that a field accepts."""

    low: float
    high: float
    meaning: str
    """In words, for messages: "it must be …"."""


_BELOW_ONE = math.nextafter(1.0, 0.0)
_ABOVE_ZERO = math.nextafter(0.0, 1.0)
PROBABILITY = Range(0.0, 1.0, "from 0 to 1")
SHARE = Range(0.0, _BELOW_ONE, "from 0 to below 1")
INNER_FRACTION = Range(_ABOVE_ZERO, _BELOW_ONE, "above 0 and below 1")
FRACTION = Range(_ABOVE_ZERO, 1.0, "above 0 and at most 1")
NOT_NEGATIVE = Range(0.0, math.inf, "at least 0")
POSITIVE = Range(_ABOVE_ZERO, math.inf, "above 0")
COUNT = Range(1, math.inf, "at least 1")


def number(default: float | str | None, accepted: Range) -> Any:
    """Return a dataclass field for a number of the range `accepted`."""
    return dataclasses.field(default=default, metadata={"accepted": accepted})


@dataclass(frozen=True)
class Section:
    """A part of a run's config, declared beside the code that it is for.

    Every field has a default and a docstring, which is its help. A number has a :class:`Range`
    (see :func:`number`), and so have the numbers of a list; words are a `Literal`; None is accepted
    where the type says so.

    Raises:
        ConfigError: a value is out of its range, or none of its words (a `ValueError`).
        TypeError: a number, switch or mapping was expected and something else came.
    """

    SHORT: ClassVar[str] = "name"
    """What a field `name` is called for short, where a section has one: the section's own name."""

    def __post_init__(self) -> None:
        types = field_types(type(self))
        for field in dataclasses.fields(self):
            called = self.SHORT if field.name == "name" else field.name
            accepted = field.metadata.get("accepted")
            _check(called, getattr(self, field.name), types[field.name], accepted)


@functools.cache
def field_types(section: type[Section]) -> Mapping[str, Any]:
    """Return the type of each field of a section, by name."""
    types = get_type_hints(section)
    return {field.name: types[field.name] for field in dataclasses.fields(section)}


def defaults(section: type[Section]) -> dict[str, Any]:
    """Return the default of each field of a section, by name."""
    return dataclasses.asdict(section())


def refuse_unused(section: Section, names: Iterable[str], why: str) -> None:
    """Refuse fields that are not at their defaults although nothing uses them.

    Args:
        names: the fields.
        why: which value makes them unused; it ends the message "… must be DEFAULT, as …".

    Raises:
        ConfigError: a field differs from its default.
    """
    for name in names:
        value, default = getattr(section, name), getattr(type(section), name)
        if value != default:
            raise ConfigError(f"{name} is {value!r}; it must be {default!r}, as {why}")


def check_number(
    name: str, value: Any, accepted: Range, *, whole: bool = False, meaning: str | None = None
) -> None:
    """Check a number as a field's.

    Args:
        meaning: what is accepted, in words; None for what the range says.

    Raises:
        ConfigError: it is out of its range, or not finite.
        TypeError: it is none, or not a whole one where `whole`.
    """
    meaning = meaning or accepted.meaning
    kinds, needed = ((int,), "whole number") if whole else ((int, float), "number")
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"{name} is {value!r}; a {needed} is needed ({meaning})")
    finite = isinstance(value, int) or math.isfinite(value)
    if not finite or not accepted.low <= value <= accepted.high:
        raise ConfigError(f"{name} is {value}; it must be {meaning}")


def _check(name: str, value: Any, kind: Any, accepted: Range | None) -> None:
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if value is None and NoneType in kinds:
        return
    words = [word for each in kinds if get_origin(each) is Literal for word in get_args(each)]
    meaning = " or ".join((*([accepted.meaning] if accepted else []), *words))
    lists = [each for each in kinds if get_origin(each) is list]
    if lists:
        if not isinstance(value, list):
            raise TypeError(f"{name} is {value!r}; a list is needed")
        for place, each in enumerate(value):
            _check(f"{name}[{place}]", each, get_args(lists[0])[0], accepted)
    elif accepted is not None and not (words and isinstance(value, str)):
        check_number(name, value, accepted, whole=float not in kinds, meaning=meaning)
    elif words:
        if value not in words:
            raise ConfigError(f"{name} is {value!r}; it must be {meaning}")
    elif bool in kinds:
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; true or false is needed")
    elif str in kinds:
        if not isinstance(value, str) or not value or "\0" in value:
            orelse = " or null" if NoneType in kinds else ""
            raise ConfigError(f"{name} is {value!r}; it must be a non-empty string{orelse}")
    elif get_origin(kind) is dict:
        _check_mapping(name, value)
    else:
        raise AssertionError(f"the field {name} is of type {kind}, which nothing checks")


def _check_mapping(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise TypeError(f"{name} is {value!r}; a mapping of names to values is needed")
    try:
        json.dumps(value)  # as checkpoints hold it
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is {value!r}; {error}") from error
