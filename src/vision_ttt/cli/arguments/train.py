"""The arguments of `vision-ttt train`: a recipe, and a flag for each field of a run."""

import contextlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jsonargparse

from vision_ttt import environment, recipes, tasks
from vision_ttt.cli.parser import CommandParser, descriptions
from vision_ttt.engine.config import TaskSection, section_types
from vision_ttt.engine.section import Section, defaults, field_types
from vision_ttt.errors import UserError
from vision_ttt.recipes.names import short_names

_EPILOG = """Examples:

  vision-ttt train digits --epochs 5                       a packaged recipe, one field overridden
  vision-ttt train folder --dataset PATH                   an image folder, one sub-folder per class
  vision-ttt train folder --dataset PATH --initial-weights W.safetensors
  vision-ttt train digits --arguments.depth 2              an argument of the model
  vision-ttt train digits --updates 500                    another length
  vision-ttt train my-recipe.yaml --output runs/second
  vision-ttt train digits --resume auto                    after Ctrl-C, a crash, kill -9

A flag is the last name of a field, or its whole name: --epochs and --optimisation.epochs are the
same. vision-ttt train RECIPE --help shows the flags of that recipe's task.

Exit codes: 0 finished, or stopped by SIGTERM after a checkpoint was written; 1 an internal error of
vision-ttt; 2 an error in the command, the recipe, the data or the disk; 3 NaN or infinity in the
loss or a gradient; 4 a process that reads the data hangs or died; 130 Ctrl-C, after a checkpoint
was written. To continue after SIGTERM, 4 or 130, repeat the command with --resume auto. torchrun
has its own exit codes: 1 after every signal and every error."""

DEFAULT_TASK = "classification"
"""Task whose flags the help shows if no recipe is given."""

COMMON = (
    *("model", "arguments", "initial_weights", "dataset", "image_size"),
    *("epochs", "batch_size", "learning_rate", "precision", "num_workers", "seed", "output"),
)
"""What help explains first, as far as the task has it."""

_FIRST_GROUP = "the fields that are set most often"
_TITLES = {
    "task": "the task, {}",
    "data": "the data",
    "model": "the model",
    "optimisation": "optimisation, by AdamW",
    "machine": "the machine",
    "run": "the run",
}


def add_arguments(parser: CommandParser) -> None:
    """Declare the recipe and the two ways to treat an existing run."""
    parser.usage = "vision-ttt train RECIPE [--resume | --overwrite] [--FIELD VALUE ...]"
    parser.epilog = _EPILOG
    parser.add_argument(
        "recipe",
        type=str,
        help=f"a packaged recipe ({', '.join(recipes.available())}), one with an ablation or"
        " variants, such as digits+dual or pile+125m+mlp, or the path of a .yaml file",
    )
    parser.add_argument(
        "--resume",
        type=Literal["false", "true", "auto"],
        default="false",
        help="resume the run in the output directory from its newest valid checkpoint; auto: resume"
        " if there is a checkpoint, else start",
    )
    parser.add_argument(
        "--overwrite",
        type=bool,
        default=False,
        help="start a new run in the output directory; an earlier run moves to former/ in it;"
        " a directory that contains files but no run is refused",
    )


def parse(parser: CommandParser, argv: Sequence[str]) -> jsonargparse.Namespace:
    """Parse `argv`, leaving out what was not given: the recipe comes before the defaults.

    The recipe's task decides which flags there are.
    """
    task, values = _task(argv)
    _add_fields(parser, task, values or {})
    arguments = parser.parse_command(argv, defaults=False)
    arguments.task_section, arguments.recipe_values = task, values
    return arguments


def check(arguments: jsonargparse.Namespace) -> None:
    """Resolve the recipe with what was given, as `arguments.stages`.

    Raises:
        ConfigError, FileNotFoundError: as :func:`vision_ttt.recipes.load_stages` does.
    """
    if environment.whole_number("RANK", 0):  # of several processes the first one logs
        logging.getLogger("vision_ttt").setLevel(logging.WARNING)
    fields = short_names(arguments.task_section)
    given = arguments.as_dict()
    overrides = {name: value for name, value in given.items() if name in fields}
    values = arguments.recipe_values or recipes.read(arguments.recipe)
    arguments.stages = recipes.resolve_stages(arguments.recipe, values, overrides)


def _task(argv: Sequence[str]) -> tuple[type[TaskSection], Mapping[str, Any] | None]:
    """Return the task and the recipe: the task of a flag, otherwise the recipe's or the default.

    The recipe is None if it has not been read; `check` then reads it and raises its errors.
    """
    for token, follower in itertools.pairwise([*argv, ""]):
        flag, equals, value = token.partition("=")
        if flag in ("--task", "--task.name"):
            return tasks.find(value if equals else follower), None
    if argv and not argv[0].startswith("-"):
        with contextlib.suppress(UserError, OSError):
            values = recipes.read(argv[0])
            return recipes.task_of(values), values
    return tasks.find(DEFAULT_TASK), None


def _add_fields(parser: CommandParser, task: type[TaskSection], recipe: Mapping[str, Any]) -> None:
    """Declare a flag for each field of a run of `task`, by its short name.

    Help shows the values of `recipe`, as :func:`vision_ttt.recipes.read` returns it, as defaults.
    """
    places = short_names(task)
    groups: dict[str, list[str]] = {_FIRST_GROUP: [name for name in COMMON if name in places]}
    for name, (section, _) in places.items():
        if name not in COMMON:
            title = _TITLES[section].format(task().name)
            groups.setdefault(title, []).append(name)
    for title, names in groups.items():
        description = _about_defaults(recipe) if title == _FIRST_GROUP else None
        group = parser.add_argument_group(title, description)
        for name in names:
            section, field = places[name]
            declared = _declaration(section_types(task)[section], field)
            if field in recipe.get(section, {}):
                declared["default"] = recipe[section][field]
            group.add_argument(f"--{name}", **declared)
            parser.long_names[f"--{section}.{field}"] = f"--{name}"


def _about_defaults(recipe: Mapping[str, Any]) -> str:
    if not recipe:
        return "A recipe replaces these defaults."
    stages = ", ".join(recipe.get(recipes.STAGES, ()))
    return "The defaults are the recipe's." + (
        f" Its stages ({stages}) set others." if stages else ""
    )


def _declaration(section: type[Section], field: str) -> dict[str, Any]:
    """Type, default and help of a field; its docstring is the help."""
    return {
        "type": field_types(section)[field],
        "default": defaults(section)[field],
        "help": descriptions(section)[field],
    }
