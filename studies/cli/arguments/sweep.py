"""The arguments of `python -m studies sweep`."""

from pathlib import Path
from typing import Literal

import jsonargparse

from studies.sweeps import SWEEPS, TITLES
from vision_ttt.cli.checks import (
    check_input_file,
    check_new_folder,
    check_range,
    check_renewed_file,
)
from vision_ttt.cli.parser import CommandParser
from vision_ttt.errors import UserError

MOST_JOBS = 1_024  # processes side by side

_EPILOG = """Examples:

  python -m studies sweep ablation-digits --list
  python -m studies sweep ablation-digits --rows dual vittt --seeds 0 1 2 3 4 --output runs/longer
  python -m studies sweep ablation-digits --missing-only --results RESULTS.csv
  python -m studies sweep ablation-digits --table-only --results RESULTS.csv

After an interruption, the same command continues: it keeps finished runs and resumes the unfinished
ones from their last checkpoints. The table and the picture are made again from the finished runs.
Lines of RESULTS.csv for other runs are kept. To divide a large sweep over several sittings or
machines, use --missing-only, which does not repeat runs that have a line there. Exit codes: 0 every
run is finished; 1 a run failed, and the end of its log is printed; 2 an error in the command; 130
Ctrl-C."""


def add_arguments(parser: CommandParser) -> None:
    """Declare which sweep, which part of it, and where the results go."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "name",
        type=Literal[tuple(SWEEPS)],
        help="; ".join(f"{name}: {title}" for name, title in TITLES.items()),
    )
    parser.add_argument(
        "--list", type=bool, default=False, help="only print the rows and their changes"
    )
    parser.add_argument(
        "--rows", type=str, nargs="+", default=None, help="rows to train; default: all"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=None,
        help="seeds of each row; default: the sweep's, three or five",
    )
    parser.add_argument(
        "--epochs", type=int, default=None, help="epochs of every run; default: the sweep's"
    )
    parser.add_argument(
        "--patch_size",
        type=int,
        default=None,
        help="side in pixels of every model's patches; default: the sweep's",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=None,
        help="number of runs at a time, one thread each; default: the number of cores",
    )
    parser.add_argument(
        "--missing_only",
        type=bool,
        default=False,
        help="train only runs that the CSV file of --results lacks, and add them to it",
    )
    parser.add_argument(
        "--output",
        type=str,
        default=None,
        help="folder of the runs, OUTPUT/ROW/seed-K; default: runs/sweep-NAME",
    )
    parser.add_argument(
        "--results",
        type=str,
        default=None,
        help="CSV file to write, one line per run; default: OUTPUT/results.csv",
    )
    parser.add_argument(
        "--page",
        type=str,
        default=None,
        help="page to write the table into, between <!-- bench:NAME --> and <!-- /bench -->",
    )
    parser.add_argument(
        "--figure",
        type=str,
        default=None,
        help="picture to write or overwrite; default: OUTPUT/NAME.png",
    )
    parser.add_argument(
        "--panels",
        type=str,
        nargs="+",
        default=None,
        help="titles of the panels in the picture; default: all",
    )
    parser.add_argument(
        "--table_only",
        type=bool,
        default=False,
        help="make table and picture from the CSV file of --results without training",
    )


def check(arguments: jsonargparse.Namespace) -> None:
    """Fill in where results go; refuse files that are none, and too many processes."""
    check_range(arguments, jobs=(1, MOST_JOBS), seeds=(0, 2**32 - 1), patch_size=(1, 1_024))
    for name in ("figure", "results", "output"):
        if arguments[name] == "":
            raise UserError(f"--{name} is empty; name one, or leave it out")
    output = Path(arguments.output or f"runs/sweep-{arguments.name}")
    arguments.output = str(output)
    check_new_folder("--output", arguments.output)
    arguments.figure = arguments.figure or str(output / f"{arguments.name}.png")
    arguments.results = arguments.results or str(output / "results.csv")
    if arguments.page is not None:
        check_input_file("the page", arguments.page)
    if arguments.table_only and arguments.missing_only:
        raise UserError("--table-only trains nothing: leave out --missing-only")
    if arguments.table_only:
        check_input_file("the results", arguments.results)
    for name in ("figure", "results"):
        check_renewed_file(f"--{name}", arguments[name])
