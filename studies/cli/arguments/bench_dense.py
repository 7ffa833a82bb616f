"""The arguments of `python -m studies bench dense`."""

import re

import jsonargparse

from studies.bench.names import DENSE
from vision_ttt.cli.arguments.bench import LARGEST_SIDE, MOST_PIXELS
from vision_ttt.cli.checks import LARGEST_BATCH, check_range, shortened
from vision_ttt.cli.parser import CommandParser
from vision_ttt.errors import UserError


def add_dense_arguments(parser: CommandParser) -> None:
    """Declare the models and images of `bench dense`."""
    parser.add_argument(
        "--models",
        type=str,
        nargs="+",
        default=None,
        help="plain backbones by their timm names, as for vision-ttt bench models; of the runtimes,"
        f" for_inference is accepted. Default: {', '.join(DENSE)}",
    )
    parser.add_argument(
        "--sizes",
        type=str,
        nargs="+",
        default=["1333x800"],
        metavar="WIDTHxHEIGHT",
        help="pixels of images",
    )
    parser.add_argument("--batch_size", type=int, default=1, help="images per call")


def check_dense(arguments: jsonargparse.Namespace) -> None:
    """Refuse sizes, models and dtypes that `bench dense` cannot measure."""
    check_range(arguments, batch_size=(1, LARGEST_BATCH))
    sizes = list(map(parse_size, arguments.sizes))
    for height, width in sizes:
        pixels = arguments.batch_size * height * width
        if pixels > MOST_PIXELS:
            raise UserError(f"a batch has {pixels:,} pixels; it must have at most {MOST_PIXELS:,}")
    for name in arguments.models or ():
        _, colon, runtime = name.partition(":")
        if colon and runtime != "for_inference":
            raise UserError(
                f"{shortened(name)!r} names a runtime; bench dense accepts for_inference"
            )
        if colon and (arguments.device != "cpu" or arguments.compile):
            raise UserError(f"{shortened(name)!r} is for --device cpu and models without --compile")
    if arguments.dtype == "float16" and arguments.device == "cpu":
        raise UserError("dtype float16 is for cuda; accepted on cpu: float32, bfloat16")


def parse_size(text: str) -> tuple[int, int]:
    """(height, width) of "WIDTHxHEIGHT".

    Raises:
        UserError: the text is no size, or a side is out of its range.
    """
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", text)
    if match is None:
        raise UserError(f"--sizes has {shortened(text)!r}; write sizes as WIDTHxHEIGHT: 1333x800")
    width, height = map(int, match.groups())
    for side in (width, height):
        if not 1 <= side <= LARGEST_SIDE:
            raise UserError(f"--sizes has {text}; sides must be 1 to {LARGEST_SIDE:,} pixels")
    return height, width
