"""The arguments of `python -m studies bench dense|lm|ops|table`."""

from collections.abc import Sequence
from typing import Literal

import jsonargparse

from studies.bench.names import MOST_LINES
from studies.cli.arguments.bench_dense import add_dense_arguments, check_dense
from studies.cli.arguments.bench_language import add_language_arguments, check_language
from vision_ttt.cli.arguments.bench import (
    add_baseline,
    add_measuring_arguments,
    add_op_arguments,
    check_measuring,
    check_ops,
)
from vision_ttt.cli.checks import check_input_file, check_renewed_file
from vision_ttt.cli.parser import CommandParser
from vision_ttt.errors import UserError

KINDS = {
    "dense": "time inference of backbones with a ViT-Adapter, and of the backbones alone",
    "lm": "time prefill, decode and training steps of language models beside a Llama",
    "ops": "time an op's backends beside flash-linear-attention or mambapy, where installed",
    "table": "print the newest rows of a CSV file as Markdown, or put them into a page",
}

_EPILOG = """Examples:

  python -m studies bench dense --sizes 1333x800 2048x2048
  python -m studies bench lm --contexts 8192 32768 --decode_contexts 8192
  python -m studies bench table benchmarks/results/models-cpu.csv --figure models.png

`python -m studies bench WHAT --help` explains the flags of each. Models, training steps and ops
alone are measured by vision-ttt bench. Beside another project all heads scan forwards, and all
tokens share one learning rate, since these projects support nothing else."""


def add_arguments(parser: CommandParser) -> None:
    """Declare what to do; each has flags of its own."""
    parser.epilog = _EPILOG
    summaries = "; ".join(f"{kind}: {summary}" for kind, summary in KINDS.items())
    parser.add_argument("what", type=Literal[tuple(KINDS)], help=summaries)


def parse(parser: CommandParser, argv: Sequence[str]) -> jsonargparse.Namespace:
    """Parse `argv`: what to do, then its own flags."""
    what = parser.parse_command(argv[:1]).what
    own = CommandParser(f"{parser.prog} {what}", KINDS[what])
    if what == "table":
        _add_table_arguments(own)
    else:
        add = {"dense": add_dense_arguments, "lm": add_language_arguments, "ops": add_op_arguments}
        add[what](own)
        add_measuring_arguments(own, f"studies/results/{what}-DEVICE.csv")
    arguments = own.parse_command(argv[1:])
    arguments.what = what
    return arguments


def check(arguments: jsonargparse.Namespace) -> None:
    """Refuse what can be known to fail before hours of measuring; fill in where rows go."""
    if arguments.what == "table":
        _check_showing(arguments)
        check_input_file("the table", arguments.file)
        if arguments.page is not None:
            check_input_file("--page", arguments.page)
        return
    check_measuring(arguments)
    {"dense": check_dense, "lm": check_language, "ops": check_ops}[arguments.what](arguments)
    if arguments.output is None:
        arguments.output = f"studies/results/{arguments.what}-{arguments.device}.csv"


def _check_showing(arguments: jsonargparse.Namespace) -> None:
    check_renewed_file("--figure", arguments.figure)
    exponent = arguments.exponent
    if exponent is not None and exponent[0] >= exponent[1]:
        raise UserError(f"--exponent is {exponent[0]} {exponent[1]}; the first must be the smaller")
    if len(arguments.lines or ()) > MOST_LINES:
        raise UserError(
            f"--lines names {len(arguments.lines)} contenders; a picture shows at most {MOST_LINES}"
        )


def _add_table_arguments(parser: CommandParser) -> None:
    parser.add_argument("file", type=str, help="CSV file that a bench command wrote")
    parser.add_argument(
        "--page",
        type=str,
        default=None,
        help="page to write the table into, between <!-- bench:NAME --> and <!-- /bench -->",
    )
    parser.add_argument(
        "--name",
        type=str,
        default=None,
        help="NAME of the place; default: the file's without suffix",
    )
    parser.add_argument(
        "--headline",
        type=str,
        default=None,
        metavar="CONTENDER",
        help="contender to summarise instead of writing the tables: a sentence and a short table of"
        " its speed relative to the strongest alternative, eager PyTorch and plain attention",
    )
    add_baseline(parser)
    parser.add_argument(
        "--figure",
        type=str,
        default=None,
        help="picture of cost against size to write or overwrite, for the batch size, dtype and"
        " machine with the most sizes (among equals, the last row's)",
    )
    parser.add_argument(
        "--lines",
        type=str,
        nargs="+",
        default=None,
        help="contenders in the picture, at most six; default: the fastest of one model size that"
        " were measured at several image sizes",
    )
    parser.add_argument(
        "--exponent",
        type=int,
        nargs=2,
        default=None,
        metavar=("FROM", "TO"),
        help="fit time ~ tokens^s between these sizes (pixels along a side; ops: tokens); prints s",
    )
