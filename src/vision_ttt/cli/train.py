"""`vision-ttt train RECIPE [--field value …]`."""

from collections.abc import Sequence

import jsonargparse
from rich.console import Console

from vision_ttt import recipes
from vision_ttt.cli.main import CommandParser
from vision_ttt.cli.run_report import write_run_report
from vision_ttt.engine import TrainConfig, train
from vision_ttt.engine.config import FIELDS


def add_arguments(parser: CommandParser) -> None:
    """Declare the recipe, the two ways to treat an existing run, and one flag per field."""
    parser.add_argument(
        "recipe",
        type=str,
        help=f"a packaged recipe ({', '.join(recipes.available())}) or the path of a .yaml file",
    )
    parser.add_argument(
        "--resume", type=bool, default=False, help="go on with the run in the output directory"
    )
    parser.add_argument(
        "--overwrite",
        type=bool,
        default=False,
        help="start anew though the output directory holds a run, which moves to former/ in it",
    )
    parser.add_class_arguments(TrainConfig)


def parse(parser: CommandParser, argv: Sequence[str]) -> jsonargparse.Namespace:
    """Parse `argv`, leaving out what was not given: the recipe comes before the defaults."""
    return parser.parse_command(argv, defaults=False)


def run(arguments: jsonargparse.Namespace) -> int:
    """Train, and say where the results are."""
    given = arguments.as_dict()
    config = recipes.load(
        arguments.recipe, {name: value for name, value in given.items() if name in FIELDS}
    )
    result = train(
        config,
        resume=given.get("resume", False),
        overwrite=given.get("overwrite", False),
        progress=True,
    )
    report = write_run_report(result)
    Console().print(
        f"test accuracy {result.evaluation.accuracy:.2%} after {config.epochs} epochs"
        f" ({result.metrics['seconds']:.0f} s); the report is {report}",
        highlight=False,
        soft_wrap=True,
    )
    return 0
