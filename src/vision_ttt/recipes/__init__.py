"""Published training runs: YAML files of the sections and fields of `TrainConfig`."""

import importlib.resources
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vision_ttt.extras import require

require("train", "vision_ttt.recipes")

from vision_ttt.engine.config import LENGTHS, ConfigError, TaskSection, TrainConfig, section_types
from vision_ttt.errors import suggestions
from vision_ttt.recipes.files import parse, read_text
from vision_ttt.recipes.names import Nested, nested
from vision_ttt.recipes.resolution import change, changed_task, merge, resolve, task_of

__all__ = [
    "available",
    "change",
    "load",
    "load_stages",
    "merge",
    "read",
    "resolve",
    "resolve_stages",
    "task_of",
]

_LOGGER = logging.getLogger(__name__)

STAGES = "stages"
"""The key of a recipe in several stages, beside the sections."""
VARIANTS = "variants"
"""The key of a packaged recipe's named changes, beside the sections."""
EXTENDS = "extends"
"""The key that names a packaged recipe, to which a recipe says the differences."""
_IN_PROPORTION = ("warmup", "inner_warmup", "decay_at")


def available() -> tuple[str, ...]:
    """Return the packaged recipes' names, sorted."""
    files = importlib.resources.files(__name__).iterdir()
    return tuple(sorted(Path(file.name).stem for file in files if file.name.endswith(".yaml")))


def read(recipe: str) -> dict[str, Any]:
    """Return what a recipe sets, by section and field; `stages` is among the keys where it has any.

    Args:
        recipe: a packaged name or the path of a YAML file, which may say `extends: NAME` and
            differences to that packaged recipe. A packaged name may be followed by +VARIANT,
            several times: changes that the recipe names, made in its own order, or a row of the
            model's ablations (Vision-TTT's Tables 3 and 4 and Fig. 7; Mamba-Reg's Tables 4 and 6;
            TTT's Table 1).

    Raises:
        ConfigError: no such packaged recipe or variant, not UTF-8, not a mapping, no task, or an
            unknown key.
        FileNotFoundError: no such file.
    """
    if recipe.endswith((".yaml", ".yml")) or "/" in recipe:
        return _extended(recipe, parse(recipe, read_text(Path(recipe))))
    name, *chosen = recipe.split("+")
    if name not in available():
        raise ConfigError(
            f"unknown recipe {name!r}; {suggestions(name, available())}"
            " (vision-ttt train --help names all), or give the path of a .yaml file"
        )
    resource = importlib.resources.files(__name__) / f"{name}.yaml"
    values = parse(name, resource.read_text(encoding="utf-8"))
    variants = values.pop(VARIANTS, {})
    values = _extended(name, values)
    return _varied(values, variants, chosen) if chosen else values


def _varied(
    values: dict[str, Any], variants: Mapping[str, Any], chosen: Sequence[str]
) -> dict[str, Any]:
    """Return a packaged recipe's values for some of its variants and ablations."""
    model, output = values["model"]["name"], values["run"]["output"]
    rows = _ablations(model)
    for each in chosen:
        if each not in variants and each not in rows:
            known = ", ".join((*variants, *rows))
            known = f"known are {known}" if known else "there are none"
            raise ConfigError(f"unknown variant {each!r} of {model}; {known}")
    for variant, changes in variants.items():
        if variant in chosen:
            values = _merged(values, changes, _overridden)
    for row in (each for each in chosen if each in rows):
        changes = {"model": {"arguments": rows[row]}}
        # An ablation starts from its own weights.
        runs, run, *rest = Path(values["model"].get("initial_weights") or "").parts or ("", "")
        if runs == "runs" and run.partition("+")[0] in available():
            changes["model"]["initial_weights"] = str(Path(runs, f"{run}+{row}", *rest))
        values = _merged(values, changes)
    values["run"]["output"] = "+".join((output, *chosen))
    return values


def _ablations(model: str) -> dict[str, dict[str, Any]]:
    """Row's name → its arguments of the model."""
    from vision_ttt.models import mamba_reg_ablations, vittt_ablations  # with PyTorch
    from vision_ttt.tasks.language import ablations

    families = {"vittt_": vittt_ablations, "mambar_": mamba_reg_ablations, "ttt": ablations}
    return {
        name: row.keywords
        for prefix, family in families.items()
        if model.startswith(prefix)
        for name, row in family.ABLATIONS.items()
    }


def _extended(recipe: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's values by section, with those of the packaged recipe that it extends.

    Raises:
        ConfigError: there is no such recipe, or as for `_checked`.
    """
    if EXTENDS not in values:
        return _checked(recipe, values)
    if (base := values.pop(EXTENDS)) not in available():
        raise ConfigError(
            f"recipe {recipe} extends {base!r}; packaged are {', '.join(available())}"
        )
    former = read(base)
    former["run"] = {**former.get("run", {}), "output": f"runs/{Path(recipe).stem}"}
    return _merged(former, _checked(recipe, values, changed_task(former, values)))


def _merged(
    values: Mapping[str, Any], changes: Mapping[str, Any], combine: Callable[..., Nested] = merge
) -> dict[str, Any]:
    """Return a recipe's values with some changed, stage by stage where it has stages."""
    task = changed_task(values, changes)().name
    stages = {**values.get(STAGES, {}), **changes.get(STAGES, {})}
    former, own = (
        {name: each[name] for name in each if name != STAGES} for each in (values, changes)
    )
    whole: dict[str, Any] = combine(former, own)
    if stages:
        whole[STAGES] = {
            name: merge(
                *(
                    {"task.name": task, **each.get(STAGES, {}).get(name, {})}
                    for each in (values, changes)
                )
            )
            for name in stages
        }
    return whole


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

    In a staged recipe, `stages` maps the name of each stage to the fields that the stage sets in
    addition to the recipe's own. A stage writes into the sub-folder with its name, and starts from
    the last weights of the stage before.

    `overrides` apply to every stage and are named as for `resolve`. Overrides of mappings, such as
    `model.arguments`, are merged with the recipe's key by key, and null removes a key. A length
    (epochs, updates, units) replaces the recipe's. If it is shorter or in another unit, the
    warm-ups and steps change in proportion unless they are overridden, too; this is logged.

    Raises:
        ConfigError, FileNotFoundError: as for `load`.
    """
    return resolve_stages(recipe, read(recipe), overrides)


def resolve_stages(
    recipe: str, values: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> dict[str, TrainConfig]:
    """Return the runs of a recipe that is read already; see `load_stages`.

    Args:
        recipe: its name or path.
        values: what :func:`read` returns of it.
        overrides: as of `load_stages`.

    Raises:
        ConfigError: an unknown field, a wrong type or a value out of range.
    """
    sections = {name: fields for name, fields in values.items() if name != STAGES}
    changes = nested(overrides or {}, changed_task(sections, overrides or {}))
    if STAGES not in values:
        return {"": resolve(_overridden(sections, changes))}
    from vision_ttt.engine.checkpoint import WEIGHTS_FILE  # with PyTorch

    own = {**sections.get("run", {}), **changes.get("run", {})}
    output = Path(str(own.get("output", Path("runs", Path(recipe).stem))))
    runs: dict[str, TrainConfig] = {}
    start: dict[str, Any] = {}
    for name, fields in values[STAGES].items():
        run = _overridden(merge(sections, fields), changes)
        run.setdefault("run", {})["output"] = str(output / name)
        run.setdefault("model", {}).update(start)
        runs[name] = resolve(run)
        start = {"initial_weights": str(output / name / WEIGHTS_FILE)}
    return runs


def _overridden(values: Nested, changes: Nested) -> Nested:
    """Return `values` with `changes`, and the warm-ups and steps that fit another length."""
    merged = merge(values, changes)
    given = changes.get("optimisation", {})
    former, now = values.get("optimisation", {}), merged.get("optimisation", {})
    lengths = [_length(each) for each in (former, now)]
    if lengths[0] == lengths[1] or None in lengths:
        return merged
    (unit, whole), (asked_unit, asked) = lengths
    if unit == asked_unit and not 1 <= asked < whole:
        return merged
    for name in _IN_PROPORTION:
        part = former.get(name)
        points = part if isinstance(part, list) else [part]
        # `resolve` says what is wrong with those that are no numbers.
        if name in given or not all(isinstance(each, int | float) and each for each in points):
            continue
        scaled = [round(each * asked / whole, 6) for each in points]
        now[name] = scaled if isinstance(part, list) else scaled[0]
        if points:
            _LOGGER.info(
                "%s: %s instead of the recipe's %s, as %s are %g instead of %s%g",
                *(name, _listed(scaled), _listed(points), asked_unit, asked),
                *("" if unit == asked_unit else f"{unit} ", whole),
            )
    return merged


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{each:g}" for each in numbers)


def _length(optimisation: Mapping[str, Any]) -> tuple[str, float] | None:
    """Unit and length of a run; None where `resolve` will say what is wrong with it."""
    found = [(name, optimisation[name]) for name in LENGTHS if optimisation.get(name) is not None]
    if len(found) != 1 or not isinstance(found[0][1], int | float):
        return None
    return found[0]


def _checked(
    recipe: str, values: dict[str, Any], task: type[TaskSection] | None = None
) -> dict[str, Any]:
    """Return a recipe's values by section, its keys checked.

    Args:
        recipe: its name or path.
        values: of its file.
        task: None for the one that the values name.

    Raises:
        ConfigError: an unknown key, a field outside its section, no task, or stages that are none.
    """
    place = f"recipe {recipe}"
    stages = values.pop(STAGES, None)
    task = task or task_of(values, place)
    checked: dict[str, Any] = _by_section(values, task, place)
    if stages is None:
        return checked
    if not isinstance(stages, dict) or not stages:
        raise ConfigError(f"{place}: {STAGES} must map names to sections")
    checked[STAGES] = {}
    for name, fields in stages.items():
        # It names a sub-folder.
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
            raise ConfigError(f"{place}: {name!r} cannot be the name of a stage")
        stage = f"{place}, stage {name},"
        if not isinstance(fields, dict):
            raise ConfigError(f"{stage} must map sections to fields, got {type(fields).__name__}")
        checked[STAGES][name] = _by_section(fields, task, stage)
    return checked


def _by_section(values: Mapping[str, Any], task: type[TaskSection], place: str) -> Nested:
    for name, value in values.items():
        if name in section_types(task) and not isinstance(value, Mapping | str):
            raise ConfigError(
                f"{place} must map {name} to fields and values, got {type(value).__name__}"
            )
        if name not in section_types(task):
            nested({name: value}, task, place)  # raises where the name is unknown
            home = next(iter(nested({name: value}, task)))
            raise ConfigError(f"{place} has {name!r} outside its section; write it below {home}:")
    return nested(values, task, place)
