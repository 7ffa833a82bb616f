"""`python -m studies bench dense|lm|ops|table`."""

import itertools
from pathlib import Path

import jsonargparse

from studies.bench import dense, peers
from studies.bench.headline import headline
from studies.bench.names import DENSE
from studies.bench.page import markdown, replace_in
from studies.bench.selection import comparable, newest
from studies.cli.arguments.bench_dense import parse_size
from studies.cli.pictures import check_picture, draw
from vision_ttt.bench.contenders import find_contenders
from vision_ttt.bench.rows import read_rows
from vision_ttt.cli import bench
from vision_ttt.cli.bench_session import (
    check_measured,
    check_session,
    measure_and_show,
    settings_of,
    using_threads,
)
from vision_ttt.cli.plain_console import plain_console
from vision_ttt.errors import UserError
from vision_ttt.extras import require


def run(arguments: jsonargparse.Namespace) -> int:
    """Measure, or show what was measured."""
    if arguments.what == "table":
        return _table(arguments)
    if arguments.what == "ops":
        peers.enter()
        return bench.run(arguments)
    check_session(arguments)
    with using_threads(arguments.threads):
        return _dense(arguments) if arguments.what == "dense" else _language(arguments)


def _dense(arguments: jsonargparse.Namespace) -> int:
    sizes = list(dict.fromkeys(map(parse_size, arguments.sizes)))
    settings = settings_of(arguments, arguments.batch_size)
    contenders = find_contenders(arguments.models or DENSE)
    check_measured("baseline", arguments.baseline, [contender.label for contender in contenders])
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
    require("lm", "bench lm")
    from studies.bench import language
    from studies.bench.language_contenders import find_language_contenders
    from vision_ttt.language import TTTConfig

    readers = find_language_contenders(arguments.readers)
    learners = find_language_contenders(arguments.learners)
    labels = [contender.label for contender in (*readers, *learners)]
    check_measured("baseline", arguments.baseline, labels)
    layers = {} if arguments.num_layers is None else {"num_hidden_layers": arguments.num_layers}
    size = TTTConfig.of_size(arguments.size, vocab_size=arguments.vocab_size, **layers)
    names = ("contexts", "decode_contexts", "train_contexts")
    lengths = {name: list(dict.fromkeys(arguments[name])) for name in names}
    batches = list(dict.fromkeys(arguments.batch_size))
    settings = settings_of(arguments, batches[0])
    steps = language.steps_of_language(readers, learners, list(lengths.values()), settings.repeats)
    measure_and_show(
        arguments,
        settings,
        steps * len(batches),
        lambda run, advance: itertools.chain.from_iterable(
            language.measure_language(
                readers,
                learners,
                size,
                settings_of(arguments, batch),
                run,
                decode_tokens=arguments.decode_tokens,
                advance=advance,
                **lengths,
            )
            for batch in batches
        ),
        language.remarks,
    )
    return 0


def _table(arguments: jsonargparse.Namespace) -> int:
    check_picture(arguments.figure)
    path = Path(arguments.file)
    rows = read_rows(path)
    if not rows:
        raise UserError(f"{path} has no rows")
    labels = [row.contender for row in rows]
    check_measured("baseline", arguments.baseline, labels)
    for name in (arguments.headline, *(arguments.lines or ())):
        check_measured("contender", name, labels)
    if arguments.figure is not None:
        draw(comparable(newest(rows)), Path(arguments.figure), arguments.lines)
    if arguments.headline is not None and {row.what for row in rows} - {"models", "train"}:
        raise UserError("--headline is for rows of bench models or bench train")
    if arguments.headline is None:
        text = markdown(rows, arguments.baseline, between=arguments.exponent)
    else:
        text = headline(rows, arguments.headline)
    if arguments.page is None:
        plain_console().print(text, highlight=False, soft_wrap=True)
    else:
        replace_in(Path(arguments.page), arguments.name or path.stem, text)
    return 0
