"""The arguments of `vision-ttt demo`."""

from dataclasses import dataclass

import jsonargparse

from vision_ttt.cli.parser import CommandParser


@dataclass
class _Flags:
    """What one would want to change in a demonstration."""

    output: str = "runs/demo"
    """folder of the run; an earlier run moves to former/ in it"""
    epochs: int | None = None
    """passes over the 1,297 training images"""
    seed: int = 0
    """seed of weights, order and augmentation"""


def add_arguments(parser: CommandParser) -> None:
    """Declare the flags."""
    parser.add_fields(_Flags)


def check(arguments: jsonargparse.Namespace) -> None:
    """Resolve the recipe `digits` with what was given, as `arguments.config`.

    Raises:
        ConfigError: a value is out of its range.
    """
    from vision_ttt import recipes

    given = {name: arguments[name] for name in ("output", "epochs", "seed")}
    given = {name: value for name, value in given.items() if value is not None}
    arguments.config = recipes.load("digits", given)
