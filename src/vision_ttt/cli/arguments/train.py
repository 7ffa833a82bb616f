"""The arguments of `vision-ttt train`: a recipe, and a flag for each field of a run."""

import dataclasses
import logging
import os
from collections.abc import Sequence
from typing import Any, Literal, get_type_hints

import docstring_parser
import jsonargparse

from vision_ttt import recipes
from vision_ttt.cli.parser import CommandParser
from vision_ttt.engine.config import FIELDS, TrainConfig

_EPILOG = """Examples:

  vision-ttt train digits --epochs 5                       a packaged recipe, one field overridden
  vision-ttt train folder --dataset PATH                   an image folder, one sub-folder per class
  vision-ttt train folder --dataset PATH --initial-weights W.safetensors
  vision-ttt train digits --model-args.depth 2             an argument of the model
  vision-ttt train my-recipe.yaml --output runs/second
  vision-ttt train digits --resume auto                    after Ctrl-C, a crash, kill -9

Exit codes: 0 finished, or ended by SIGTERM with a checkpoint to go on from; 1 an error of
vision-ttt itself; 2 something to mend in the command, the recipe, the data or the disk; 3 the loss
or a gradient was not finite; 4 the processes that load images hang or died; 130 Ctrl-C, with a
checkpoint. After 0 by SIGTERM, 4 and 130 the same command with --resume auto goes on. torchrun has
exit codes of its own: 1 after every signal and every error."""

COMMON = (
    *("model", "model_args", "image_size", "initial_weights", "dataset", "num_workers"),
    *("epochs", "batch_size", "learning_rate", "precision", "seed", "output"),
)
"""What help explains first."""

_FIRST_GROUP = "the fields that are set most often"
_SECTIONS = {
    "drop_path": "the model",
    "objective": "models that denoise (dit3_*)",
    "dataset_root": "the data",
    "crop_scale": "augmentation of training images",
    "accumulation_steps": "optimisation, by AdamW",
    "compile": "the machine",
    "checkpoint_every": "the run",
}
"""The first field of each group of the others, in the order of `TrainConfig`, and its title."""


def add_arguments(parser: CommandParser) -> None:
    """Declare the recipe, the two ways to treat an existing run, and one flag per field."""
    parser.usage = "vision-ttt train RECIPE [--resume | --overwrite] [--FIELD VALUE ...]"
    parser.epilog = _EPILOG
    parser.add_argument(
        "recipe",
        type=str,
        help=f"a packaged recipe ({', '.join(recipes.available())}), one with an ablation, such as"
        " digits+dual, or the path of a .yaml file",
    )
    parser.add_argument(
        "--resume",
        type=Literal["false", "true", "auto"],
        default="false",
        help="go on with the run in the output directory, from its newest whole checkpoint; auto:"
        " if there is one, else start",
    )
    parser.add_argument(
        "--overwrite",
        type=bool,
        default=False,
        help="start anew though the output directory holds a run, which moves to former/ in it",
    )
    for title, names in _groups().items():
        told = "A recipe sets what is not given." if title == _FIRST_GROUP else None
        group = parser.add_argument_group(title, told)
        for name in names:
            group.add_argument(f"--{name}", **_declaration(name))


def parse(parser: CommandParser, argv: Sequence[str]) -> jsonargparse.Namespace:
    """Parse `argv`, leaving out what was not given: the recipe comes before the defaults.

    A bare --resume means --resume true.
    """
    spelt = []
    for position, token in enumerate(argv):
        spelt.append(token)
        follower = argv[position + 1] if position + 1 < len(argv) else ""
        if token == "--resume" and follower not in ("false", "true", "auto"):
            spelt.append("true")
    return parser.parse_command(spelt, defaults=False)


def check(arguments: jsonargparse.Namespace) -> None:
    """Resolve the recipe with what was given, as `arguments.stages`.

    Raises:
        ConfigError, FileNotFoundError: as :func:`vision_ttt.recipes.load_stages` does.
    """
    if int(os.environ.get("RANK", "0")):  # of several processes the first one speaks
        logging.getLogger("vision_ttt").setLevel(logging.WARNING)
    given = arguments.as_dict()
    overrides = {name: value for name, value in given.items() if name in FIELDS}
    arguments.stages = recipes.load_stages(arguments.recipe, overrides)


def _groups() -> dict[str, list[str]]:
    """The fields by the title they stand under."""
    groups = {_FIRST_GROUP: list(COMMON)}
    title = ""
    for name in FIELDS:
        title = _SECTIONS.get(name, title)
        if name not in COMMON:
            groups.setdefault(title, []).append(name)
    return groups


def _declaration(name: str) -> dict[str, Any]:
    """Type, default and help of a field; its docstring is the help."""
    field = next(each for each in dataclasses.fields(TrainConfig) if each.name == name)
    fresh = field.default is dataclasses.MISSING
    default = field.default_factory() if fresh else field.default
    return {"type": _TYPES[name], "default": default, "help": _EXPLAINED[name]}


_TYPES = get_type_hints(TrainConfig)
_EXPLAINED = {
    each.arg_name: " ".join(each.description.split())
    for each in docstring_parser.parse_from_object(TrainConfig).params
}
