"""The arguments of `vision-ttt demo-dense`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jsonargparse

from vision_ttt.cli.checks import check_new_folder, check_range, check_renewed_file
from vision_ttt.cli.parser import CommandParser
from vision_ttt.demo_dense.runs import MODELS, RECIPES, scene_run, with_starts

_EPILOG = """Examples:

  vision-ttt demo-dense                                a detector and a segmenter of Vittt-nano
  vision-ttt demo-dense --tasks segmentation           without the detector
  vision-ttt demo-dense --models vittt deit --seeds 3  beside a DeiT-nano, mean and spread
  vision-ttt demo-dense --render_only                  the scenes alone, as COCO and as ADE20K

Killed or interrupted, the same command goes on: rendered scenes and finished runs are kept, the run
at work resumes from its last checkpoint. OUTPUT/report.html shows the runs that are asked for; each
has a report of its own beside its weights, in OUTPUT/TASK/MODEL/seed-K. The recipes are
scenes-classification, scenes-segmentation and scenes-detection, which vision-ttt train takes, too,
once the scenes are there."""


def add_arguments(parser: CommandParser) -> None:
    """Declare what is trained, for how long, and where it goes."""
    parser.epilog = _EPILOG
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
        "--models",
        type=Literal[tuple(MODELS)],
        nargs="+",
        default=["vittt"],
        help="backbones: vittt (Vittt-nano), deit (a DeiT of the same width, depth and patches,"
        " with the same adapter, heads and updates)",
    )
    parser.add_argument(
        "--seeds", type=int, default=1, help="runs of each model and task, with seeds 0, 1, 2 …"
    )
    parser.add_argument(
        "--updates", type=int, default=None, help="length of a run; default: the recipe's"
    )
    parser.add_argument(
        "--train_images", type=int, default=4000, help="scenes to train on, 128 × 128 pixels"
    )
    parser.add_argument(
        "--test_images", type=int, default=200, help="scenes to test on, with other digits"
    )
    parser.add_argument(
        "--train_objects",
        type=int,
        default=8000,
        help="pictures of single objects to train on, 48 × 48 pixels",
    )
    parser.add_argument(
        "--test_objects", type=int, default=500, help="pictures of single objects to test on"
    )
    parser.add_argument("--render_only", type=bool, default=False, help="only render the scenes")
    parser.add_argument(
        "--output",
        type=str,
        default="runs/demo-dense",
        help="folder of the scenes, the runs and the report",
    )
    parser.add_argument(
        "--results",
        type=str,
        default=None,
        help="CSV file to write, one line per run; default: OUTPUT/results.csv",
    )


def parse(parser: CommandParser, argv: Sequence[str]) -> jsonargparse.Namespace:
    """Parse `argv` and keep it: every result says what command it is of."""
    arguments = parser.parse_command(argv)
    arguments.command = ("vision-ttt", "demo-dense", *argv)
    return arguments


def check(arguments: jsonargparse.Namespace) -> None:
    """Make the runs' configs, as `arguments.runs`: (model, config) each.

    Raises:
        UserError: a value is out of its range, or a path cannot be used.
    """
    counts = ("train_images", "test_images", "train_objects", "test_objects")
    check_range(arguments, seeds=(1, 1_000), **dict.fromkeys(counts, (1, 100_000)))
    check_new_folder("--output", arguments.output)
    output = Path(arguments.output)
    arguments.results = arguments.results or str(output / "results.csv")
    check_renewed_file("--results", arguments.results)
    overrides = {} if arguments.updates is None else {"updates": arguments.updates}
    # Seed by seed: whatever moment a reader looks, models have seen about the same seeds.
    arguments.runs = [
        (
            model,
            scene_run(task, model, seed, output / "scenes", output, overrides),
        )
        for seed in range(arguments.seeds)
        for task in with_starts(arguments.tasks)
        for model in dict.fromkeys(arguments.models)
    ]
