"""The command `vision-ttt`: find the command, parse its arguments, run it, report its errors.

A command is two modules. One works, `vision_ttt.cli.MODULE`, and returns the exit code:

    run(arguments: jsonargparse.Namespace) -> int

The other one, `vision_ttt.cli.arguments.NAME` (- is written _ there), declares its arguments and
refuses what can be refused without PyTorch:

    add_arguments(parser: CommandParser) -> None
    parse(parser, argv) -> jsonargparse.Namespace    (optional)
    check(arguments: jsonargparse.Namespace) -> None   (optional) raises UserError

Another package's program calls :func:`main` with commands of its own, whose modules lie beside each
other likewise: PACKAGE.MODULE and PACKAGE.arguments.NAME.
"""

import errno
import importlib
import io
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rich.table import Table

from vision_ttt._version import __version__
from vision_ttt.cli.parser import CommandParser
from vision_ttt.errors import (
    Interrupted,
    LoaderError,
    UserError,
    dead_workers_named,
    suggestions,
)
from vision_ttt.safe_console import SafeConsole


class Command(NamedTuple):
    """Which module does a command's work, and what it does, in half a line."""

    module: str
    summary: str


COMMANDS = {
    "train": Command("vision_ttt.cli.train", "train a model by a recipe"),
    "eval": Command("vision_ttt.cli.evaluate", "evaluate a checkpoint on a dataset"),
    "predict": Command("vision_ttt.cli.predict", "predict the content of images"),
    "explain": Command(
        "vision_ttt.cli.explain", "draw gradient maps, receptive fields and inner losses"
    ),
    "sample": Command("vision_ttt.cli.sample", "generate images with a diffusion model"),
    "tokenize": Command("vision_ttt.cli.tokenize", "write documents as tokens, for training"),
    "generate": Command("vision_ttt.cli.generate", "continue a text with a language model"),
    "models": Command("vision_ttt.cli.models", "list the models with parameters and MACs"),
    "convert": Command(
        "vision_ttt.cli.convert", "convert an author's released weights to a checkpoint"
    ),
    "export": Command("vision_ttt.cli.export", "write a checkpoint for timm, torch.export or ONNX"),
    "app": Command("vision_ttt.cli.app", "show predictions and maps in the browser"),
    "bench": Command("vision_ttt.cli.bench", "measure speed and memory"),
    "demo": Command("vision_ttt.cli.demo", "train on handwritten digits and write a report"),
    "demo-dense": Command(
        "vision_ttt.cli.demo_dense", "train a detector and a segmenter on rendered scenes"
    ),
}

USER_ERROR = 2  # exit code, as argparse has it
MACHINE_FAILED = 4  # exit code: a process that reads the data hung or died
INTERRUPTED = 130  # exit code, 128 + SIGINT as shells have it

# What a disk, or a terminal, refuses in the middle of writing: such errors name no file.
_REFUSED_WRITING = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)


class _ConsoleHandler(logging.Handler):
    """Prints log messages unwrapped, above the progress bar where there is one."""

    def __init__(self, console: SafeConsole) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(
            self.format(record), markup=False, emoji=False, highlight=False, soft_wrap=True
        )


def main(
    argv: Sequence[str] | None = None,
    *,
    commands: Mapping[str, Command] | None = None,
    program: str = "vision-ttt",
    begin_work: Callable[[], None] = lambda: None,
) -> int:
    """Run `vision-ttt` with `argv` (default: the process's arguments) and return the exit code.

    0: done; 1: `eval` of a model that computes NaN or infinity, or `bench` of a contender that
    fails its check; 2: an error of the user, reported in one line on stderr; 3: `train` met NaN or
    infinity; 4: a worker process hung or died; 130: interrupted; 141: the reader of the output has
    gone. Errors of the library itself keep their traceback.

    Args:
        commands: name → command; by default :data:`COMMANDS`. Another package passes its own
            commands, and those of vision-ttt that support what it registers.
        program: how the process was called, for help and messages.
        begin_work: called when the arguments are accepted, the command's modules are imported, and
            it begins.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files may be no text
    errors = SafeConsole(stderr=True)
    try:
        code = _run(argv, errors, commands or COMMANDS, program, begin_work)
        _flush(errors)
        return code
    except Interrupted as interruption:
        return _fail(errors, INTERRUPTED, str(interruption), "interrupted")
    except KeyboardInterrupt:
        return _fail(errors, INTERRUPTED, "nothing further was written", "interrupted")
    except LoaderError as error:
        return _fail(errors, MACHINE_FAILED, str(error))
    except UserError as error:
        return _fail(errors, USER_ERROR, str(error))
    except OSError as error:
        if error.filename is None and error.errno not in _REFUSED_WRITING:
            raise  # not about a file that the user named: an internal error
        reason = error.strerror or str(error)
        named = "" if error.filename is None else f": {error.filename}"
        return _fail(errors, USER_ERROR, f"{reason}{named}")


def _run(
    argv: Sequence[str],
    errors: SafeConsole,
    commands: Mapping[str, Command],
    program: str,
    begin_work: Callable[[], None],
) -> int:
    if any("\0" in token for token in argv):
        raise UserError("an argument holds a null character, which no name of a file has")
    for token in argv:
        try:
            os.fsencode(token)
        except UnicodeEncodeError:
            raise UserError(
                f"the argument {token!r} holds half a character (a surrogate), which no name has"
            ) from None
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    if not argv or argv[0] in ("-h", "--help"):
        _show_commands(SafeConsole(), commands, program)
        return 0 if argv else USER_ERROR
    if argv[0] == "--version":
        SafeConsole().print(f"vision-ttt {__version__}", highlight=False)
        return 0
    name = argv[0]
    if name not in commands:
        raise UserError(f"unknown command {name!r}; {suggestions(name, commands)}")
    command = commands[name]
    for package in {"vision_ttt", command.module.partition(".")[0]}:
        _log_to(errors, logging.getLogger(package))
    parser = CommandParser(f"{program} {name}", command.summary)
    package = command.module.rpartition(".")[0]
    declared = importlib.import_module(f"{package}.arguments.{name.replace('-', '_')}")
    declared.add_arguments(parser)
    # `train` reads its recipe before the flags that override it, so it parses for itself.
    parse = getattr(declared, "parse", CommandParser.parse_command)
    arguments = parse(parser, argv[1:])
    arguments.command = (*parser.prog.split(), *argv[1:])  # for results that record it
    if hasattr(declared, "check"):
        declared.check(arguments)
    module = importlib.import_module(command.module)
    _start_no_programs()
    begin_work()
    with dead_workers_named():
        return module.run(arguments)


def _start_no_programs() -> None:
    """Keep Pillow from starting Ghostscript on EPS files, whoever opens them by Pillow."""
    from PIL import EpsImagePlugin

    EpsImagePlugin.gs_binary = False


def _flush(console: SafeConsole) -> None:
    """Write what is left of the output."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        console.on_broken_pipe()


def _show_commands(console: SafeConsole, commands: Mapping[str, Command], program: str) -> None:
    console.print(f"usage: {program} COMMAND [ARGUMENTS]\n", highlight=False, markup=False)
    table = Table.grid(padding=(0, 2))
    for name, command in commands.items():
        table.add_row(f"  {name}", command.summary)
    console.print(table)
    console.print(f"\n{program} COMMAND --help explains a command.", highlight=False)


def _fail(console: SafeConsole, code: int, message: str, kind: str = "error") -> int:
    """Tell why the command ends, in one line, and return its exit code."""
    console.print(f"[bold red]{kind}:[/]", end=" ", highlight=False)
    one_line = " ".join(message.splitlines())
    console.print(one_line, markup=False, emoji=False, highlight=False, soft_wrap=True)
    return code


def _log_to(console: SafeConsole, logger: logging.Logger) -> None:
    if not logger.handlers:
        logger.addHandler(_ConsoleHandler(console))
    logger.setLevel(logging.INFO)
