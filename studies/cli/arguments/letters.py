"""The arguments of `python -m studies letters`."""

import jsonargparse

from vision_ttt.cli.checks import check_new_folder, check_range
from vision_ttt.cli.parser import CommandParser

RANGES = {
    "side": (64, 8192),
    "classes": (2, 25),
    "glyph": (12, 128),
    "density": (0.01, 1),
    "clutter": (0, 1),
    "seed": (0, 2**63 - 1),
    "mark": (8, 4096),
}
"""What pictures of letters accept; told here, because the arguments are checked without NumPy."""

_EPILOG = """Examples:

  python -m studies letters runs/letters --sheet-only             a picture of some, to look at
  python -m studies letters runs/letters                          the set
  python -m studies letters runs/letters-512 --side 512 --train-images 4000

After an interruption, the same command continues; it leaves a complete set as it is. Every picture
is in three layouts: at 256² pixels it takes 0.4 MB, in proportion at others. To train a
segmenter the pictures need no folder: python -m studies train studies/letters/letters.yaml renders
them while it trains. studies/pages/letters.md explains what is on them, and has the commands to
train on a folder."""


def add_arguments(parser: CommandParser) -> None:
    """Declare where the pictures go, what is on them, and how many there are."""
    parser.epilog = _EPILOG
    parser.add_argument("folder", type=str, help="folder of the set; new, or that of the same set")
    parser.add_argument("--side", type=int, default=256, help="side of the pictures in pixels")
    parser.add_argument("--classes", type=int, default=10, help="number of letters of the alphabet")
    parser.add_argument(
        "--glyph", type=int, default=28, help="height of the letters in pixels, at any side"
    )
    parser.add_argument(
        "--density",
        type=float,
        default=0.7,
        help="share of the places, 1.5 glyphs apart, that have a letter",
    )
    parser.add_argument(
        "--clutter",
        type=float,
        default=0.5,
        help="share of the other places that have strokes in the letters' colours",
    )
    parser.add_argument(
        "--mark",
        type=int,
        default=None,
        help="pixels along the side of the mark, half of the picture's at most; default: an eighth"
        " of the picture's",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    parser.add_argument("--train_images", type=int, default=1000, help="pictures to train on")
    parser.add_argument(
        "--validation_images",
        type=int,
        default=100,
        help="pictures to choose settings by, in fonts of their own",
    )
    parser.add_argument(
        "--test_images", type=int, default=100, help="pictures to test on, in fonts of their own"
    )
    parser.add_argument(
        "--sheet_only",
        type=bool,
        default=False,
        help="draw FOLDER/sheet.png, some pictures above their labels, and render nothing else",
    )


def check(arguments: jsonargparse.Namespace) -> None:
    """Refuse values out of range, and a folder that cannot be made."""
    counts = ("train_images", "validation_images", "test_images")
    check_range(arguments, **RANGES, **dict.fromkeys(counts, (1, 1_000_000)))
    check_new_folder("the folder", arguments.folder)
