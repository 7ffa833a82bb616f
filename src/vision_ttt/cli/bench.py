"""`vision-ttt bench ops|models|train|dense|lm|table`."""

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jsonargparse
import torch

from vision_ttt.bench import dense
from vision_ttt.bench.contenders import find_contenders, registered
from vision_ttt.bench.correctness import find_error
from vision_ttt.bench.headline import headline
from vision_ttt.bench.models import measure_models, multiply_adds, steps_of_models
from vision_ttt.bench.names import DENSE, DEPLOYED, TINY, TRAINED
from vision_ttt.bench.op_contenders import PEERS, known_contenders, op_contenders, refusal
from vision_ttt.bench.ops import measure_ops, steps_of_ops
from vision_ttt.bench.problems import Problem
from vision_ttt.bench.protocol import Settings
from vision_ttt.bench.readme import markdown, replace_in
from vision_ttt.bench.rows import comparable, newest, read_rows
from vision_ttt.cli.arguments.bench_dense import parse_size
from vision_ttt.cli.bench_session import check_picture, draw, measure_and_show, using_threads
from vision_ttt.cli.plain_console import plain_console
from vision_ttt.errors import UserError, nearest
from vision_ttt.extras import require

WRONG_RESULT = 1  # exit code: a contender failed its check and was not timed

_log = logging.getLogger(__name__)


def run(arguments: jsonargparse.Namespace) -> int:
    """Measure, or show what was measured."""
    check_picture(arguments.figure)
    if arguments.what == "table":
        return _table(arguments)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch finds no GPU here; accepted: cpu")
    with using_threads(arguments.threads):
        measure = {"ops": _ops, "dense": _dense, "lm": _language}.get(arguments.what, _models)
        return measure(arguments)


def _ops(arguments: jsonargparse.Namespace) -> int:
    settings = _settings(arguments, batch_size=arguments.shape[0])
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
        _check_measured("baseline", arguments.baseline, right)
        measure_and_show(
            arguments,
            settings,
            steps_of_ops(len(right), len(problems), settings.repeats),
            lambda run, advance: measure_ops(right, problems, settings, run, advance=advance),
        )
    return WRONG_RESULT if wrong else 0


def _models(arguments: jsonargparse.Namespace) -> int:
    resolutions = list(dict.fromkeys(arguments.resolutions))
    settings = _settings(arguments, arguments.batch_size, arguments.memory_runs)
    names = arguments.models
    if names is None:
        more = TRAINED if arguments.what == "train" else ()
        if arguments.what == "models" and arguments.device == "cpu" and not settings.compiled:
            more = DEPLOYED
        names, missing = registered([*TINY, *more])
        if missing:
            _log.info("not among the models yet, and left out: %s", ", ".join(missing))
    contenders = find_contenders(names)
    _check_measured("baseline", arguments.baseline, [contender.label for contender in contenders])
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


def _dense(arguments: jsonargparse.Namespace) -> int:
    sizes = list(dict.fromkeys(map(parse_size, arguments.sizes)))
    settings = _settings(arguments, arguments.batch_size)
    contenders = find_contenders(arguments.models or DENSE)
    _check_measured("baseline", arguments.baseline, [contender.label for contender in contenders])
    for contender, kind in itertools.product(contenders, dense.KINDS):
        dense.multiply_adds(contender, kind, sizes[0])  # raises where there is no adapter
    measure_and_show(
        arguments,
        settings,
        len(contenders) * len(dense.KINDS) * len(sizes) * (settings.repeats + 1),
        lambda run, advance: dense.measure_dense(contenders, sizes, settings, run, advance=advance),
        dense.shares,
    )
    return 0


def _language(arguments: jsonargparse.Namespace) -> int:
    require("lm", "vision-ttt bench lm")
    from vision_ttt.bench import language
    from vision_ttt.bench.language_contenders import find_language_contenders
    from vision_ttt.language import TTTConfig

    readers = find_language_contenders(arguments.readers)
    learners = find_language_contenders(arguments.learners)
    labels = [contender.label for contender in (*readers, *learners)]
    _check_measured("baseline", arguments.baseline, labels)
    layers = {} if arguments.num_layers is None else {"num_hidden_layers": arguments.num_layers}
    size = TTTConfig.of_size(arguments.size, vocab_size=arguments.vocab_size, **layers)
    names = ("contexts", "decode_contexts", "train_contexts")
    lengths = {name: list(dict.fromkeys(arguments[name])) for name in names}
    settings = _settings(arguments, arguments.batch_size)
    measure_and_show(
        arguments,
        settings,
        language.steps_of_language(readers, learners, list(lengths.values()), settings.repeats),
        lambda run, advance: language.measure_language(
            readers,
            learners,
            size,
            settings,
            run,
            decode_tokens=arguments.decode_tokens,
            advance=advance,
            **lengths,
        ),
        language.remarks,
    )
    return 0


def _table(arguments: jsonargparse.Namespace) -> int:
    path = Path(arguments.file)
    rows = read_rows(path)
    if not rows:
        raise UserError(f"{path} has no rows")
    labels = [row.contender for row in rows]
    _check_measured("baseline", arguments.baseline, labels)
    for name in (arguments.headline, *(arguments.lines or ())):
        _check_measured("contender", name, labels)
    if arguments.figure is not None:
        draw(comparable(newest(rows)), Path(arguments.figure), arguments.lines)
    if arguments.headline is None:
        text = markdown(rows, arguments.baseline, between=arguments.exponent)
    else:
        text = headline(rows, arguments.headline)
    if arguments.readme is None:
        plain_console().print(text, highlight=False, soft_wrap=True)
    else:
        replace_in(Path(arguments.readme), arguments.name or path.stem, text)
    return 0


def _settings(arguments: jsonargparse.Namespace, batch_size: int, memory_runs: int = 0) -> Settings:
    return Settings(
        device=torch.device(arguments.device),
        dtype=getattr(torch, arguments.dtype),
        batch_size=batch_size,
        compiled=arguments.compile,
        repeats=arguments.repeats,
        longest_call=math.inf if arguments.max_seconds is None else arguments.max_seconds,
        memory_runs=memory_runs,
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


def _check_measured(argument: str, name: str | None, labels: Iterable[str]) -> None:
    accepted = list(dict.fromkeys(labels))
    if name is not None and name not in accepted:
        raise UserError(f"{argument} {name!r} is not measured; accepted: {', '.join(accepted)}")
