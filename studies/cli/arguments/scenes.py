"""The arguments of `python -m studies scenes`."""

from pathlib import Path
from typing import Literal

import jsonargparse

from studies.scenes import MODELS
from vision_ttt.cli.arguments.demo_dense import add_scene_arguments, check_scenes, updates
from vision_ttt.cli.checks import check_range, check_renewed_file
from vision_ttt.cli.parser import CommandParser
from vision_ttt.demo_dense import scene_run, with_starts

_EPILOG = """Examples:

  python -m studies scenes --seeds 3                   Vittt-nano and a DeiT-nano, mean and spread
  python -m studies scenes --tasks classification      without segmentation and detection

After an interruption, the same command continues: it keeps rendered scenes and finished runs, and
resumes the unfinished run from its last checkpoint. OUTPUT/report.html shows the requested runs.
Each run has a report beside its weights, in OUTPUT/TASK/MODEL/seed-K."""


def add_arguments(parser: CommandParser) -> None:
    """Declare what is trained, for how long, and where it goes."""
    parser.epilog = _EPILOG
    add_scene_arguments(parser)
    parser.add_argument(
        "--models",
        type=Literal[tuple(MODELS)],
        nargs="+",
        default=list(MODELS),
        help="backbones: vittt (Vittt-nano), deit (a DeiT of the same width, depth and patches,"
        " with the same adapter, heads and updates)",
    )
    parser.add_argument(
        "--seeds", type=int, default=1, help="runs of each model and task, with seeds 0, 1, 2 …"
    )
    parser.add_argument(
        "--results",
        type=str,
        default=None,
        help="CSV file to write, one line per run; default: OUTPUT/results.csv",
    )


def check(arguments: jsonargparse.Namespace) -> None:
    """Make the runs' configs, as `arguments.runs`: (model, config) each.

    Raises:
        UserError: a value is out of its range, or a path cannot be used.
    """
    check_scenes(arguments)
    check_range(arguments, seeds=(1, 1_000))
    output = Path(arguments.output)
    arguments.results = arguments.results or str(output / "results.csv")
    check_renewed_file("--results", arguments.results)
    given = updates(arguments)
    # Seed by seed: whatever moment a reader looks, models have seen about the same seeds.
    arguments.runs = [
        (model, scene_run(task, output, {**MODELS[model], **given}, model=model, seed=seed))
        for seed in range(arguments.seeds)
        for task in with_starts(arguments.tasks)
        for model in dict.fromkeys(arguments.models)
    ]
