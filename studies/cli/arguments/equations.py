"""The arguments of `python -m studies equations`."""

from typing import Literal

import jsonargparse

from vision_ttt.cli.checks import check_range
from vision_ttt.cli.parser import CommandParser
from vision_ttt.errors import UserError

SIZES = ("tiny", "small", "base")


def add_arguments(parser: CommandParser) -> None:
    """Declare the models' sizes and the images'."""
    parser.add_argument(
        "--sizes", type=Literal[SIZES], nargs="+", default=["tiny"], help="sizes of the models"
    )
    parser.add_argument(
        "--resolutions",
        type=int,
        nargs="+",
        default=[224, 512, 1024, 1280],
        help="sides of the images in pixels, multiples of 16",
    )


def check(arguments: jsonargparse.Namespace) -> None:
    """Refuse sides that are no whole patches."""
    check_range(arguments, resolutions=(16, 8192))
    for side in arguments.resolutions:
        if side % 16:
            raise UserError(f"--resolutions has {side}; accepted: multiples of 16")
