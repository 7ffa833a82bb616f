"""The arguments of `python -m studies deletion`."""

from pathlib import Path
from typing import Literal

import jsonargparse

from vision_ttt.cli.checks import (
    LARGEST_BATCH,
    check_input_file,
    check_range,
    check_renewed_file,
    checkpoint_path,
)
from vision_ttt.cli.parser import CommandParser
from vision_ttt.errors import UserError

FILLS = ("mean", "blur", "black")
MOST_IMAGES = 1_000_000
MOST_POINTS = 1_001
MOST_DRAWS = 1_000

_EPILOG = """Examples:

  python -m studies deletion runs/digits/last.safetensors
  python -m studies deletion runs/digits/seed-*/last.safetensors --images 200 --results R.csv
  python -m studies deletion --table-only --results R.csv --page studies/pages/deletion.md

Checkpoints of the same model and data are taken for the seeds of one row of the table. The
CSV file keeps its results of other checkpoints and of other data; the table and the picture show
them, too."""


def add_arguments(parser: CommandParser) -> None:
    """Declare the checkpoints, what is measured of them, and where the results go."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "checkpoints", type=str, nargs="*", help="weights files of classifiers, of any seed"
    )
    parser.add_argument(
        "--images",
        type=int,
        default=500,
        help="number of test images, evenly spaced in the test set",
    )
    parser.add_argument(
        "--classes",
        type=str,
        nargs="+",
        default=None,
        help="names of the classes whose test images are used; default: all",
    )
    parser.add_argument(
        "--fills",
        type=Literal[FILLS],
        nargs="+",
        default=list(FILLS),
        help="values of removed pixels: the image's mean colour, the image blurred by the side of a"
        " token, black; the picture shows the first",
    )
    parser.add_argument(
        "--methods",
        type=str,
        nargs="+",
        default=None,
        help="orders of tokens in addition to the random one; default: all that support the model",
    )
    parser.add_argument("--points", type=int, default=11, help="points of each curve")
    parser.add_argument("--draws", type=int, default=3, help="random orders of each image")
    parser.add_argument(
        "--dataset",
        type=str | None,
        default=None,
        help="other data than the checkpoints': 'digits', an image folder or a name timm reads",
    )
    parser.add_argument("--batch_size", type=int, default=64, help="images per forward pass")
    parser.add_argument(
        "--results",
        type=str,
        default="runs/deletion-insertion.csv",
        help="CSV file to write or update: a line per checkpoint, order and fill",
    )
    parser.add_argument(
        "--figure",
        type=str,
        default=None,
        help="picture to write or overwrite; default: RESULTS with the suffix .png",
    )
    parser.add_argument(
        "--page",
        type=str,
        default=None,
        help="page to write the tables into, between <!-- bench:deletion-insertion --> and"
        " <!-- /bench -->",
    )
    parser.add_argument(
        "--table_only",
        type=bool,
        default=False,
        help="make tables and picture from the CSV file of --results without measuring",
    )


def check(arguments: jsonargparse.Namespace) -> None:
    """Refuse numbers out of range, no checkpoint, and files that cannot be written."""
    check_range(
        arguments,
        images=(1, MOST_IMAGES),
        points=(2, MOST_POINTS),
        draws=(1, MOST_DRAWS),
        batch_size=(1, LARGEST_BATCH),
    )
    if bool(arguments.checkpoints) == arguments.table_only:
        raise UserError(
            "name the checkpoints to measure, or give --table-only and none (see python -m"
            " studies deletion --help)"
        )
    arguments.checkpoints = [checkpoint_path(given) for given in arguments.checkpoints]
    if arguments.table_only:
        check_input_file("the results", arguments.results)
    if arguments.page is not None:
        check_input_file("the page", arguments.page)
    for name in ("results", "figure"):
        if arguments[name] == "":
            raise UserError(f"--{name} is empty; name a file, or leave it out")
    if arguments.figure is None:
        arguments.figure = str(Path(arguments.results).with_suffix(".png"))
    for name in ("results", "figure"):
        check_renewed_file(f"--{name}", arguments[name])
