"""The arguments of `vision-ttt demo`."""

import jsonargparse

from vision_ttt.cli.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    """Declare what one would want to change in a demonstration."""
    parser.add_argument(
        "--output",
        type=str,
        default="runs/demo",
        help="folder of the run; an earlier run moves to former/ in it",
    )
    parser.add_argument(
        "--epochs", type=int, default=None, help="passes over the 1,297 training images"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights, order and augmentation"
    )


def check(arguments: jsonargparse.Namespace) -> None:
    """Resolve the recipe `digits` with what was given, as `arguments.config`.

    Raises:
        ConfigError: a value is out of its range.
    """
    from vision_ttt import recipes

    given = {name: arguments[name] for name in ("output", "epochs", "seed")}
    given = {name: value for name, value in given.items() if value is not None}
    arguments.config = recipes.load("digits", given)
