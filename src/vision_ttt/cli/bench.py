"""`vision-ttt bench ops|models|train`."""

import itertools
import logging
from collections.abc import Iterator, Sequence

import jsonargparse

from vision_ttt.bench.contenders import find_contenders
from vision_ttt.bench.correctness import find_error
from vision_ttt.bench.models import measure_models, multiply_adds, steps_of_models
from vision_ttt.bench.names import DEPLOYED, TINY, TRAINED
from vision_ttt.bench.op_contenders import PEERS, known_contenders, op_contenders, refusal
from vision_ttt.bench.ops import measure_ops, steps_of_ops
from vision_ttt.bench.problems import Problem
from vision_ttt.bench.protocol import Settings
from vision_ttt.cli.bench_session import (
    check_measured,
    check_session,
    measure_and_show,
    settings_of,
    using_threads,
)
from vision_ttt.errors import UserError, suggestions

WRONG_RESULT = 1  # exit code: a contender failed its check and was not timed

_log = logging.getLogger(__name__)


def run(arguments: jsonargparse.Namespace) -> int:
    """Measure and show."""
    check_session(arguments)
    with using_threads(arguments.threads):
        return _ops(arguments) if arguments.what == "ops" else _models(arguments)


def _ops(arguments: jsonargparse.Namespace) -> int:
    settings = settings_of(arguments, batch_size=arguments.shape[0])
    batch, tokens, heads, dim = arguments.shape
    lengths = list(dict.fromkeys(arguments.lengths or [tokens]))
    mini_batch_size, op = arguments.mini_batch_size, arguments.op
    problems = [Problem(batch, length, heads, dim, mini_batch_size, op) for length in lengths]
    serving = list(_serving(arguments.backends, problems[0], settings))
    peers = [name for name in PEERS.get(op, ()) if name in serving]
    if peers:
        problems = [problem._replace(shared=True) for problem in problems]
        _log.info("because of %s: %s", peers[0], problems[0].case)
    right, wrong = [], []
    for name in serving:
        error = find_error(name, problems[0], settings.dtype, settings.device)
        (right if error is None else wrong).append(name)
        if error is not None:
            _log.error("%r gives wrong results and is not timed: %s", name, error)
    if right:
        check_measured("baseline", arguments.baseline, right)
        measure_and_show(
            arguments,
            settings,
            steps_of_ops(len(right), len(problems), settings.repeats),
            lambda run, advance: measure_ops(right, problems, settings, run, advance=advance),
        )
    return WRONG_RESULT if wrong else 0


def _models(arguments: jsonargparse.Namespace) -> int:
    resolutions = list(dict.fromkeys(arguments.resolutions))
    settings = settings_of(arguments, arguments.batch_size, arguments.memory_runs)
    names = arguments.models
    if names is None:
        more = TRAINED if arguments.what == "train" else ()
        if arguments.what == "models" and arguments.device == "cpu" and not settings.compiled:
            more = DEPLOYED
        names = [*TINY, *more]
    contenders = find_contenders(names)
    check_measured("baseline", arguments.baseline, [contender.label for contender in contenders])
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


def _serving(names: Sequence[str] | None, problem: Problem, settings: Settings) -> Iterator[str]:
    """The contenders asked for, which must all serve, or those of the default that do."""
    known = known_contenders(problem.op)
    for name in dict.fromkeys(names or op_contenders(problem.op)):
        if name not in known:
            raise UserError(f"unknown backend {name!r}; {suggestions(name, known)}")
        reason = refusal(name, problem, settings.dtype, settings.device)
        if reason is None:
            yield name
        elif names is None:
            _log.info("backend %r is left out: %s", name, reason)
        else:
            raise UserError(f"backend {name!r} does not support this call: {reason}")
