"""`vision-ttt bench ops|models|train|table`."""

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jsonargparse
import torch
from rich.console import Console

from vision_ttt.bench.contenders import TINY, find_contenders, registered
from vision_ttt.bench.correctness import find_error
from vision_ttt.bench.flash_linear_attention import NAME as PEER
from vision_ttt.bench.models import measure_models, multiply_adds, steps_of_models
from vision_ttt.bench.op_contenders import known_contenders, op_contenders, refusal
from vision_ttt.bench.ops import measure_ops, steps_of_ops
from vision_ttt.bench.problems import Problem
from vision_ttt.bench.protocol import Settings
from vision_ttt.bench.readme import markdown, replace_in
from vision_ttt.bench.rows import comparable, newest, read_rows
from vision_ttt.cli.bench_arguments import (
    add_measuring_arguments,
    add_model_arguments,
    add_op_arguments,
    add_table_arguments,
)
from vision_ttt.cli.bench_session import check_picture, draw, measure_and_show, using_threads
from vision_ttt.cli.main import CommandParser
from vision_ttt.errors import UserError, nearest

KINDS = {
    "ops": "time the backends of an op and their peers, beside the machine's matmul rate",
    "models": "time inference of models against the resolution",
    "train": "time training steps (forward and backward) of models against the resolution",
    "table": "print the newest rows of a CSV file as Markdown, or put them into a README",
}

WRONG_RESULT = 1  # exit code: a contender failed its check and was not timed

_log = logging.getLogger(__name__)


def add_arguments(parser: CommandParser) -> None:
    """Declare what to do; each has flags of its own."""
    summaries = "; ".join(f"{kind}: {summary}" for kind, summary in KINDS.items())
    parser.add_argument(
        "what",
        choices=list(KINDS),
        help=f"{summaries}. `vision-ttt bench WHAT --help` explains its flags",
    )


def parse(parser: CommandParser, argv: Sequence[str]) -> jsonargparse.Namespace:
    """Parse `argv`: what to do, then its own flags."""
    what = parser.parse_command(argv[:1]).what
    own = CommandParser(
        prog=f"{parser.prog} {what}",
        description=KINDS[what].capitalize() + ".",
        exit_on_error=False,
    )
    if what == "table":
        add_table_arguments(own)
    else:
        (add_op_arguments if what == "ops" else add_model_arguments)(own)
        add_measuring_arguments(own, what)
    arguments = own.parse_command(argv[1:])
    arguments.what = what
    arguments.command = ["vision-ttt", "bench", *argv]
    return arguments


def run(arguments: jsonargparse.Namespace) -> int:
    """Measure, or show what was measured."""
    check_picture(arguments.figure)
    if arguments.what == "table":
        return _table(arguments)
    _check_measuring(arguments)
    with using_threads(arguments.threads):
        return _ops(arguments) if arguments.what == "ops" else _models(arguments)


def _ops(arguments: jsonargparse.Namespace) -> int:
    settings = _settings(arguments, batch_size=arguments.shape[0])
    batch, tokens, heads, dim = arguments.shape
    sizes = {
        "batch": batch,
        "heads": heads,
        "dim": dim,
        "mini-batch-size": arguments.mini_batch_size,
    }
    _check_at_least_one(sizes)
    lengths = list(dict.fromkeys(arguments.lengths or [tokens]))
    for length in lengths:
        _check_at_least_one({"tokens": length})
    mini_batch_size, op = arguments.mini_batch_size, arguments.op
    problems = [Problem(batch, length, heads, dim, mini_batch_size, op) for length in lengths]
    serving = list(_serving(arguments.backends, problems[0], settings))
    if PEER in serving:
        problems = [problem._replace(shared=True) for problem in problems]
        _log.info("because of %s: %s", PEER, problems[0].case)
    right, wrong = [], []
    for name in serving:
        error = find_error(name, problems[0], settings.dtype, settings.device)
        (right if error is None else wrong).append(name)
        if error is not None:
            _log.error("%r gives wrong results and is not timed: %s", name, error)
    if right:
        _check_baseline(arguments.baseline, right)
        measure_and_show(
            arguments,
            settings,
            steps_of_ops(len(right), len(problems), settings.repeats),
            lambda run, advance: measure_ops(right, problems, settings, run, advance=advance),
        )
    return WRONG_RESULT if wrong else 0


def _models(arguments: jsonargparse.Namespace) -> int:
    _check_at_least_one({"batch-size": arguments.batch_size})
    resolutions = list(dict.fromkeys(arguments.resolutions))
    for resolution in resolutions:
        _check_at_least_one({"resolutions": resolution})
    settings = _settings(arguments, batch_size=arguments.batch_size)
    if settings.dtype == torch.float16 and settings.device.type == "cpu":
        raise UserError("dtype float16 is for cuda; accepted on cpu: float32, bfloat16")
    names = arguments.models
    if names is None:
        names, missing = registered(TINY)
        if missing:
            _log.info("not among the models yet, and left out: %s", ", ".join(missing))
    contenders = find_contenders(names)
    _check_baseline(arguments.baseline, [contender.label for contender in contenders])
    for contender, resolution in itertools.product(contenders, resolutions):
        multiply_adds(contender, resolution)  # raises where the images do not fit
    measure_and_show(
        arguments,
        settings,
        steps_of_models(len(contenders), len(resolutions), settings.repeats),
        lambda run, advance: measure_models(
            contenders,
            resolutions,
            settings,
            run,
            train=arguments.what == "train",
            advance=advance,
        ),
    )
    return 0


def _table(arguments: jsonargparse.Namespace) -> int:
    path = Path(arguments.file)
    rows = read_rows(path)
    if not rows:
        raise UserError(f"{path} has no rows")
    _check_baseline(arguments.baseline, [row.contender for row in rows])
    if arguments.figure is not None:
        draw(comparable(newest(rows)), Path(arguments.figure))
    _check_order(arguments.exponent)
    text = markdown(rows, arguments.baseline, between=arguments.exponent)
    if arguments.readme is None:
        Console().print(text, markup=False, highlight=False, soft_wrap=True)
    else:
        replace_in(Path(arguments.readme), arguments.name or path.stem, text)
    return 0


def _settings(arguments: jsonargparse.Namespace, batch_size: int) -> Settings:
    return Settings(
        device=torch.device(arguments.device),
        dtype=getattr(torch, arguments.dtype),
        batch_size=batch_size,
        compiled=arguments.compile,
        repeats=arguments.repeats,
        longest_call=math.inf if arguments.max_seconds is None else arguments.max_seconds,
    )


def _serving(names: Sequence[str] | None, problem: Problem, settings: Settings) -> Iterator[str]:
    """The contenders asked for, which must all serve, or those of the default that do."""
    known = known_contenders(problem.op)
    for name in dict.fromkeys(names or op_contenders(problem.op, settings.device)):
        if name not in known:
            raise UserError(f"unknown backend {name!r}; nearest: {nearest(name, known)}")
        reason = refusal(name, problem, settings.dtype, settings.device)
        if reason is None:
            yield name
        elif names is None:
            _log.info("backend %r is left out: %s", name, reason)
        else:
            raise UserError(f"backend {name!r} cannot serve: {reason}")


def _check_measuring(arguments: jsonargparse.Namespace) -> None:
    """Refuse what can be known to fail before hours of measuring."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch finds no GPU here; accepted: cpu")
    _check_at_least_one({"repeats": arguments.repeats, "threads": arguments.threads or 1})
    if arguments.max_seconds is not None and not arguments.max_seconds > 0:
        raise UserError(f"max-seconds is {arguments.max_seconds:g}; it must be above 0")
    if arguments.exponent is not None:
        _check_order(arguments.exponent)
        smallest, largest = arguments.exponent
        flag = "lengths" if arguments.what == "ops" else "resolutions"
        if len({size for size in arguments[flag] or [] if smallest <= size <= largest}) < 2:
            raise UserError(
                f"--exponent {smallest} {largest} needs two sizes or more between them; name them"
                f" by --{flag}"
            )


def _check_order(exponent: Sequence[int] | None) -> None:
    if exponent is not None and exponent[0] >= exponent[1]:
        raise UserError(f"--exponent is {exponent[0]} {exponent[1]}; the first must be the smaller")


def _check_at_least_one(values: dict[str, int]) -> None:
    for name, value in values.items():
        if value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")


def _check_baseline(baseline: str | None, accepted: Iterable[str]) -> None:
    accepted = list(dict.fromkeys(accepted))
    if baseline is not None and baseline not in accepted:
        raise UserError(f"baseline {baseline!r} is not measured; accepted: {', '.join(accepted)}")
