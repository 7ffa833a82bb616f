"""The command `vision-ttt`: find the command, parse its arguments, run it, report its errors.

A command is a module with two functions: `add_arguments(parser: CommandParser) -> None` declares
its arguments; `run(arguments: jsonargparse.Namespace) -> int` works and returns the exit code.
"""

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jsonargparse
from rich.console import Console
from rich.table import Table

from vision_ttt._version import __version__
from vision_ttt.errors import Interrupted, UserError, nearest

# Help texts of dataclass fields are the docstrings under the fields.
jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)


class Command(NamedTuple):
    """Where a command lives and what it does, in half a line."""

    module: str
    summary: str


COMMANDS = {
    "train": Command("vision_ttt.cli.train", "train a model by a recipe"),
    "eval": Command("vision_ttt.cli.evaluate", "measure a checkpoint's accuracy on a dataset"),
    "predict": Command("vision_ttt.cli.predict", "name what is on images, with probabilities"),
    "sample": Command("vision_ttt.cli.sample", "generate images with a diffusion model"),
    "models": Command("vision_ttt.cli.models", "list the models with parameters and MACs"),
    "convert": Command(
        "vision_ttt.cli.convert", "make a checkpoint of an author's released weights"
    ),
    "export": Command("vision_ttt.cli.export", "write a checkpoint for timm, torch.export or ONNX"),
    "sweep": Command("vision_ttt.cli.sweep", "train every row of a comparison, over several seeds"),
    "bench": Command("vision_ttt.cli.bench", "measure speed and memory against other models"),
    "demo": Command("vision_ttt.cli.demo", "train on handwritten digits and write a report"),
}

USER_ERROR = 2  # exit code, as argparse has it
INTERRUPTED = 130  # exit code, 128 + SIGINT as shells have it


class CommandParser(jsonargparse.ArgumentParser):
    """A parser that takes `--some-flag` for `--some_flag`, bare `--switch` for `--switch true`,
    and answers an unknown flag with its nearest neighbours.
    """

    def parse_command(
        self, argv: Sequence[str], *, defaults: bool = True
    ) -> jsonargparse.Namespace:
        """Parse `argv`; with `defaults=False` only what was given is in the answer.

        Raises:
            UserError: the arguments do not fit, in one line.
        """
        try:
            # parse_args merges defaults by default; its `defaults` cannot do so with required ones.
            return self.parse_args(self._spelt_out(argv), defaults=defaults)
        except argparse.ArgumentError as error:
            message = " ".join(str(error).split())
            raise UserError(f"{message} (see {self.prog} --help)") from error

    def _spelt_out(self, argv: Sequence[str]) -> list[str]:
        flags = self._option_string_actions
        spelt = []
        for position, token in enumerate(argv):
            if not token.startswith("--") or token == "--":
                spelt.append(token)
                continue
            name, equals, value = token.partition("=")
            top, dot, key = name.partition(".")
            if top not in flags:
                top = next((flag for flag in flags if _same_flag(flag, top)), top)
            if top not in flags:
                raise UserError(
                    f"unknown flag {name}; nearest: {nearest(top, _long_flags(flags))}"
                    f" (see {self.prog} --help)"
                )
            spelt.append(top + dot + key + equals + value)
            follower = argv[position + 1] if position + 1 < len(argv) else "--"
            is_switch = getattr(flags[top], "_typehint", None) is bool
            if is_switch and not equals and follower.lower() not in ("true", "false"):
                spelt.append("true")
        return spelt


class _ConsoleHandler(logging.Handler):
    """Prints log messages unwrapped, above the progress bar where there is one."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)


def _same_flag(flag: str, given: str) -> bool:
    return flag.startswith("--") and flag[2:].replace("-", "_") == given[2:].replace("-", "_")


def _long_flags(flags: Sequence[str]) -> list[str]:
    return [flag for flag in flags if flag.startswith("--")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `vision-ttt` with `argv` (default: the process's arguments) and return the exit code.

    0: done; 2: the user's error, told in one line on stderr; 130: interrupted. Errors of the
    library itself keep their traceback.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    errors = Console(stderr=True)
    if not argv or argv[0] in ("-h", "--help"):
        _show_commands(Console())
        return 0 if argv else USER_ERROR
    if argv[0] == "--version":
        Console().print(f"vision-ttt {__version__}", highlight=False)
        return 0
    _log_to(errors)
    try:
        return _run_command(argv[0], argv[1:])
    except Interrupted as interruption:
        _show(errors, "interrupted", str(interruption))
        return INTERRUPTED
    except KeyboardInterrupt:
        _show(errors, "interrupted", "nothing further was written")
        return INTERRUPTED
    except UserError as error:
        _show(errors, "error", str(error))
        return USER_ERROR
    except OSError as error:
        if error.filename is None:  # not about a file the user named: ours to mend
            raise
        _show(errors, "error", str(error))
        return USER_ERROR


def _run_command(name: str, argv: Sequence[str]) -> int:
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}; nearest: {nearest(name, COMMANDS)}")
    command = COMMANDS[name]
    module = importlib.import_module(command.module)
    parser = CommandParser(
        prog=f"vision-ttt {name}",
        description=command.summary.capitalize() + ".",
        exit_on_error=False,
    )
    module.add_arguments(parser)
    # `train` reads its recipe before the flags that override it, so it parses for itself.
    parse = getattr(module, "parse", CommandParser.parse_command)
    return module.run(parse(parser, argv))


def _show_commands(console: Console) -> None:
    console.print("usage: vision-ttt COMMAND [ARGUMENTS]\n", highlight=False, markup=False)
    table = Table.grid(padding=(0, 2))
    for name, command in COMMANDS.items():
        table.add_row(f"  {name}", command.summary)
    console.print(table)
    console.print("\nvision-ttt COMMAND --help explains a command.", highlight=False)


def _show(console: Console, kind: str, message: str) -> None:
    console.print(f"[bold red]{kind}:[/]", end=" ", highlight=False)
    console.print(message, markup=False, highlight=False, soft_wrap=True)


def _log_to(console: Console) -> None:
    logger = logging.getLogger("vision_ttt")
    if not logger.handlers:
        logger.addHandler(_ConsoleHandler(console))
    logger.setLevel(logging.INFO)
