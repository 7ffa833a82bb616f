"""The arguments of `vision-ttt models`."""

import jsonargparse

from vision_ttt.cli.arguments.inference import JsonFlag
from vision_ttt.cli.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    """Declare the filter and the form of the output."""
    parser.add_argument(
        "pattern",
        type=str,
        nargs="?",
        help="names to list, with * and ? as wildcards, e.g. 'vittt_tiny*'; null: all",
    )
    parser.add_fields(JsonFlag)


def check(arguments: jsonargparse.Namespace) -> None:
    """Without a pattern, every name matches; jsonargparse has no default for what is no flag."""
    if arguments.pattern is None:
        arguments.pattern = "*"
