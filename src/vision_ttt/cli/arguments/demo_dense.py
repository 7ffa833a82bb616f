"""The arguments of `vision-ttt demo-dense`."""

from pathlib import Path
from typing import Literal

import jsonargparse

from vision_ttt.cli.checks import check_new_folder, check_range
from vision_ttt.cli.parser import CommandParser
from vision_ttt.demo_dense import RECIPES, scene_run, with_starts
from vision_ttt.extras import require

_COUNTS = {
    "train_images": (4000, "scenes to train on, 128 × 128 pixels"),
    "test_images": (200, "scenes to test on, with other digits"),
    "train_objects": (8000, "pictures of single objects to train on, 48 × 48 pixels"),
    "test_objects": (500, "pictures of single objects to test on"),
}
_EPILOG = """Examples:

  vision-ttt demo-dense                           a detector and a segmenter of Vittt-nano
  vision-ttt demo-dense --tasks segmentation      without the detector
  vision-ttt demo-dense --render_only             the scenes alone, as COCO and as ADE20K

After an interruption, the same command continues: it keeps rendered scenes and finished runs, and
resumes the unfinished run from its last checkpoint. Each run has a report beside its weights, in
OUTPUT/TASK/vittt/seed-0. The recipes are scenes-classification, scenes-segmentation and
scenes-detection. vision-ttt train also accepts them after the scenes have been rendered."""


def add_arguments(parser: CommandParser) -> None:
    """Declare what is trained, for how long, and where it goes."""
    parser.epilog = _EPILOG
    add_scene_arguments(parser)
    parser.add_argument("--render_only", type=bool, default=False, help="only render the scenes")


def add_scene_arguments(parser: CommandParser) -> None:
    """Declare the tasks, their length, the scenes and the folder of all."""
    parser.add_argument(
        "--tasks",
        type=Literal[tuple(RECIPES)],
        nargs="+",
        default=list(RECIPES),
        help="what to train: classification (of pictures of single objects), segmentation (each"
        " pixel's class), detection (boxes and masks of objects); each starts from the previous"
        " one's weights, which are trained, too",
    )
    parser.add_argument(
        "--updates", type=int, default=None, help="length of a run; default: the recipe's"
    )
    for name, (default, text) in _COUNTS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument(
        "--output",
        type=str,
        default="runs/demo-dense",
        help="folder of the scenes and of the runs, each with its report",
    )


def check(arguments: jsonargparse.Namespace) -> None:
    """Make the runs' configs, as `arguments.runs`.

    Raises:
        UserError: a package is missing, a value is out of its range, or a path cannot be used.
    """
    require("dense", "vision-ttt demo-dense")
    check_scenes(arguments)
    output, overrides = Path(arguments.output), updates(arguments)
    arguments.runs = [scene_run(task, output, overrides) for task in with_starts(arguments.tasks)]


def check_scenes(arguments: jsonargparse.Namespace) -> None:
    """Refuse numbers of scenes out of range, and a folder that cannot be made."""
    check_range(arguments, **dict.fromkeys(_COUNTS, (1, 100_000)))
    check_new_folder("--output", arguments.output)


def updates(arguments: jsonargparse.Namespace) -> dict[str, int]:
    """Return the field of the runs' length where it is given."""
    return {} if arguments.updates is None else {"updates": arguments.updates}
