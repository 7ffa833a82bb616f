"""`vision-ttt demo`: train on real images in minutes, and look at what was learnt."""

import jsonargparse
from rich.console import Console
from rich.table import Table

from vision_ttt import recipes
from vision_ttt.cli.main import CommandParser
from vision_ttt.cli.run_report import write_run_report
from vision_ttt.engine import train


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
    report = write_run_report(result)

    table = Table(title="vision-ttt demo: handwritten digits", show_header=False)
    table.add_row("test accuracy", f"{result.evaluation.accuracy:.2%}")
    table.add_row("parameters", f"{result.metrics['parameters']:,}")
    table.add_row("training time", f"{result.metrics['seconds']:.0f} s")
    table.add_row("report", str(report))
    table.add_row("weights", str(result.run_dir / "last.safetensors"))
    console = Console()
    console.print(table)
    console.print(
        f"next: vision-ttt predict IMAGE --checkpoint {result.run_dir / 'last.safetensors'}",
        highlight=False,
        soft_wrap=True,
    )
    return 0
