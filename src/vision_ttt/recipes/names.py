"""How a field of a run may be called: `optimisation.epochs`, or `epochs` where that is clear."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from vision_ttt import tasks
from vision_ttt.engine.config import TaskSection, section_types
from vision_ttt.engine.section import ConfigError, field_types

Nested = dict[str, dict[str, Any]]
"""Values by section and field."""


def short_names(task: type[TaskSection]) -> dict[str, tuple[str, str]]:
    """Return for each short name of a run's fields its section and field.

    A field's own name is short for it where no other section has a field of that name; a section's
    name is short for its field `name`.
    """
    sections = section_types(task)
    homes: dict[str, list[tuple[str, str]]] = {}
    for section, kind in sections.items():
        for field in field_types(kind):
            homes.setdefault(section if field == "name" else field, []).append((section, field))
    return {name: places[0] for name, places in homes.items() if len(places) == 1}


def nested(values: Mapping[str, Any], task: type[TaskSection], place: str = "") -> Nested:
    """Return values by section and field, whichever names they are given by.

    Args:
        values: by section (a mapping of its fields), by SECTION.FIELD, or by short name.
        task: of the run.
        place: where they come from, for messages.

    Raises:
        ConfigError: a name is unknown; names the nearest, or the task that has such a field.
    """
    sections = section_types(task)
    short = short_names(task)
    found: Nested = {}
    for name, value in values.items():
        section, dot, field = str(name).partition(".")
        if name in sections and isinstance(value, Mapping):
            for each in value:
                if each not in field_types(sections[name]):
                    raise _unknown(f"{name}.{each}", task, place)
            found.setdefault(name, {}).update(value)
        elif dot and section in sections and field in field_types(sections[section]):
            found.setdefault(section, {})[field] = value
        elif name in short:
            section, field = short[name]
            found.setdefault(section, {})[field] = value
        else:
            raise _unknown(str(name), task, place)
    return found


def _unknown(name: str, task: type[TaskSection], place: str) -> ConfigError:
    every = {
        f"{section}.{field}": field
        for section, kind in section_types(task).items()
        for field in field_types(kind)
    }
    own = name.rpartition(".")[2]
    where = f"{place} has " if place else ""
    if own not in every.values():
        for other in map(tasks.find, tasks.TASKS):
            if own in short_names(other):
                home = ".".join(short_names(other)[own])
                return ConfigError(
                    f"{where}the unknown key {name!r}: {home} is of task {other().name}, the run's"
                    f" is {task().name}"
                )
    # The nearest of the fields' own names: sections would make unlike ones look alike.
    close = {own} & {*every.values()} or get_close_matches(own, {*every.values()}, n=3, cutoff=0.5)
    known = [known for known, field in every.items() if field in close]
    nearest = f"nearest of task {task().name}: {', '.join(known)}"
    if not known:
        nearest = f"the sections of a run are {', '.join(section_types(task))}"
    return ConfigError(f"{where}the unknown key {name!r}; {nearest}")
