"""From values by whatever names to a run's config."""

from collections.abc import Mapping
from typing import Any

import jsonargparse

from vision_ttt import tasks
from vision_ttt.engine.config import LENGTHS, ConfigError, TaskSection, TrainConfig, section_types
from vision_ttt.engine.section import Section, field_types
from vision_ttt.recipes.names import Nested, nested


def resolve(values: Mapping[str, Any]) -> TrainConfig:
    """Return the run that `values` describe, defaults filled in and types checked.

    Args:
        values: by section, by SECTION.FIELD or by short name, see
            :func:`vision_ttt.recipes.names.nested`; the task is among them.

    Raises:
        ConfigError: no task, an unknown field, a wrong type or a value out of range.
    """
    task = task_of(values)
    given = nested(values, task)
    return TrainConfig(
        **{name: _section(kind, given.get(name, {})) for name, kind in section_types(task).items()}
    )


def change(config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """Return a run like `config` but for some fields, named as for `resolve`.

    Raises:
        ConfigError: an unknown field, a wrong type or a value out of range.
    """
    return resolve(merge(config.as_dict(), changes))


def merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> Nested:
    """Return values by section with some changed, named as for `resolve`.

    Mappings, such as `model.arguments`, change key by key, and None removes a key. A length removes
    the others.

    Raises:
        ConfigError: an unknown field.
    """
    task = changed_task(values, changes)
    own, more = nested(values, task), nested(changes, task)
    merged = {name: {**own.get(name, {}), **more.get(name, {})} for name in {**own, **more}}
    if any(more.get("optimisation", {}).get(length) is not None for length in LENGTHS):
        for length in LENGTHS:
            if length not in more["optimisation"]:
                merged["optimisation"].pop(length, None)
    for section, fields in merged.items():
        for field, value in fields.items():
            if isinstance(value, Mapping):
                former = own.get(section, {}).get(field)
                whole = {**former, **value} if isinstance(former, Mapping) else value
                fields[field] = {name: each for name, each in whole.items() if each is not None}
    return merged


def task_of(values: Mapping[str, Any], place: str = "the run") -> type[TaskSection]:
    """Return the task that values name, as `task: NAME` or as its section's `name`.

    Raises:
        ConfigError: they name none, or an unknown one.
    """
    name = _task_name(values)
    if name is None:
        raise ConfigError(f"{place} names no task; set task to one of {', '.join(tasks.TASKS)}")
    return tasks.find(name)


def changed_task(values: Mapping[str, Any], changes: Mapping[str, Any]) -> type[TaskSection]:
    """Return the task that `changes` name, or else that of `values`.

    Raises:
        ConfigError: they name none, or an unknown one.
    """
    return task_of(values if _task_name(changes) is None else changes)


def _task_name(values: Mapping[str, Any]) -> Any:
    """The name of the task that values name, None for none."""
    task = values.get("task", values.get("task.name"))
    return task.get("name") if isinstance(task, Mapping) else task


def _section(kind: type[Section], values: Mapping[str, Any]) -> Section:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    # Not add_class_arguments, which imports what a task's module names for type checkers: PyTorch.
    for name, accepted in field_types(kind).items():
        parser.add_argument(f"--{name}", type=accepted)
    try:
        try:
            given = parser.parse_object(dict(values), defaults=False).as_dict()
        except jsonargparse.ArgumentError:
            kind(**values)  # where it can, it says in its own words what is accepted
            raise
        return kind(**given)
    except (jsonargparse.ArgumentError, TypeError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
