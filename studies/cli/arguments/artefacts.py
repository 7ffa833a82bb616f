"""The arguments of `python -m studies artefacts`."""

import jsonargparse

from vision_ttt.cli.checks import LARGEST_BATCH, check_range, checkpoint_path
from vision_ttt.cli.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    """Declare the checkpoints and the images."""
    parser.add_argument("checkpoints", type=str, nargs="+", help="weights files of classifiers")
    parser.add_argument(
        "--images",
        type=int | None,
        default=None,
        help="number of test images, evenly spaced in the test set; null: all",
    )
    parser.add_argument(
        "--dataset",
        type=str | None,
        default=None,
        help="other data than the checkpoints': 'digits', an image folder or a name timm reads",
    )
    parser.add_argument("--batch_size", type=int, default=64, help="images per forward pass")


def check(arguments: jsonargparse.Namespace) -> None:
    """Refuse checkpoints that are not there, and values out of range."""
    check_range(arguments, images=(1, 1_000_000), batch_size=(1, LARGEST_BATCH))
    arguments.checkpoints = [checkpoint_path(each) for each in arguments.checkpoints]
