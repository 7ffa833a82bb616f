"""`vision-ttt demo`: train on real images in minutes, and look at what was learnt."""

import jsonargparse
from rich.console import Console

from vision_ttt import recipes
from vision_ttt.cli.main import CommandParser
from vision_ttt.cli.run_report import show_summary, write_run_report
from vision_ttt.engine import train
from vision_ttt.engine.checkpoint import WEIGHTS_FILE


def add_arguments(parser: CommandParser) -> None:
    """Declare what one would want to change in a demonstration."""
    parser.add_argument(
        "--output",
        type=str,
        default="runs/demo",
        help="folder of the run; a former one moves to former/ in it",
    )
    parser.add_argument(
        "--epochs", type=int, default=None, help="passes over the 1,297 training images"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and augmentation")


def run(arguments: jsonargparse.Namespace) -> int:
    """Train the recipe `digits`, evaluate, and write the report."""
    given = {"output": arguments.output, "epochs": arguments.epochs, "seed": arguments.seed}
    config = recipes.load("digits", {name: v for name, v in given.items() if v is not None})
    result = train(config, overwrite=True, progress=True)
    show_summary(result, write_run_report(result), "vision-ttt demo: handwritten digits")
    Console().print(
        f"next: vision-ttt predict IMAGE --checkpoint {result.run_dir / WEIGHTS_FILE}",
        highlight=False,
        soft_wrap=True,
    )
    return 0
