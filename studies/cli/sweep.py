"""`python -m studies sweep NAME`."""

import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import jsonargparse
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from studies.bench.page import replace_in
from studies.cli.pictures import check_picture, write_picture
from studies.sweeps import SWEEPS
from studies.sweeps.definition import GivenSeconds, SameSeconds, Sweep, Variant
from studies.sweeps.figure import sweep_figure
from studies.sweeps.lengths import (
    lengths_by_pace,
    of_updates,
    shares_of_updates,
)
from studies.sweeps.one_run import Task
from studies.sweeps.results import Result, finished, read_results, write_results
from studies.sweeps.runs import Failure, Outcome, run_all
from studies.sweeps.tables import (
    ACCURACIES,
    all_tables,
    by_row,
    changes,
    describe,
    in_order,
    markdown,
)
from vision_ttt.cli.plain_console import plain_console
from vision_ttt.cli.wide_table import print_figures, print_whole
from vision_ttt.errors import Interrupted, UserError
from vision_ttt.recipes import change

_LOGGER = logging.getLogger(__name__)
RUN_FAILED = 1


def run(arguments: jsonargparse.Namespace) -> int:
    """Train what is not finished yet; show and keep the results."""
    sweep = SWEEPS[arguments.name]
    if arguments.list:
        _list(sweep)
        return 0
    check_picture(arguments.figure)
    shown = sweep if arguments.panels is None else sweep.only(arguments.panels)
    results_file, figure = Path(arguments.results), Path(arguments.figure)
    former = read_results(results_file) if results_file.exists() else []
    if former:
        by_row(sweep, former)  # raises where they are another sweep's, and not to be lost
    if arguments.table_only:
        if not former:
            raise UserError(f"{results_file} holds no results; train some first")
        results, failures = former, []
    else:
        trained, failures = _train(sweep, arguments, Path(arguments.output), former)
        results = _joined(sweep, former, trained)
        if trained:
            write_results(results_file, results)
    _tell(failures)
    if results:
        _show(sweep, results)
        if arguments.page is not None:
            replace_in(Path(arguments.page), sweep.name, markdown(sweep, results))
        _LOGGER.info("results in %s", results_file)
        draw = sweep.draw or sweep_figure
        drawn = [result for result in results if result.row in shown.by_name]
        try:
            picture = draw(shown, drawn)
        except UserError as error:  # of rows that are still to be trained
            _LOGGER.warning("no picture: %s", error)
        else:
            write_picture(picture, figure, dpi=110)
            _LOGGER.info("picture in %s", figure)
    return RUN_FAILED if failures else 0


def _train(
    sweep: Sweep, arguments: jsonargparse.Namespace, output: Path, former: Sequence[Result]
) -> tuple[list[Result], list[Failure]]:
    """Train the runs asked for, and add each result to the file of the `former` ones as it comes.

    A run that has a former result is trained again, unless `--missing-only` is given.
    """
    if arguments.seeds is None:
        arguments.seeds = list(sweep.seeds)
    jobs = os.cpu_count() or 1 if arguments.jobs is None else arguments.jobs
    rows = sweep.find(arguments.rows)
    later = [row for row in rows if row.needs]
    own = [row for row in rows if not row.needs]
    wanted = {(row.name, seed) for row in rows for seed in arguments.seeds}
    kept = [r for r in former if arguments.missing_only or (r.row, r.seed) not in wanted]
    known = {(result.row, result.seed) for result in kept}
    lengths = _given_lengths(sweep, own, arguments, output, kept)
    tasks = _missing(_tasks(sweep, own, arguments, output, lengths), known)
    _check_epochs(tasks, kept, arguments.results)
    trained: list[Result] = []
    try:
        with _progress(len(wanted - known)) as show:

            def on_end(task: Task, outcome: Outcome) -> None:
                show(task, outcome)
                if isinstance(outcome, Result):
                    trained.append(outcome)
                    write_results(Path(arguments.results), _joined(sweep, former, trained))

            failures = run_all(tasks, output, jobs, on_end)
            if later:
                try:
                    more = _later_tasks(sweep, later, arguments, output, kept)
                except UserError:  # which may be for these
                    _tell(failures)
                    raise
                more = _missing(more, known)
                failures += run_all(more, output, jobs, on_end)
    except KeyboardInterrupt:
        raise Interrupted(
            f"every run in {output} has left a checkpoint; the same command continues"
        ) from None
    return trained, failures


def _joined(sweep: Sweep, former: Sequence[Result], trained: Sequence[Result]) -> list[Result]:
    """All results, in the sweep's order; a new result replaces the former one of its run."""
    results = {(result.row, result.seed): result for result in (*former, *trained)}
    return in_order(sweep, list(results.values()))


def _missing(tasks: Sequence[Task], known: Set[tuple[str, int]]) -> list[Task]:
    return [task for task in tasks if (task.row, task.config.run.seed) not in known]


def _check_epochs(tasks: Sequence[Task], kept: Sequence[Result], file: str) -> None:
    """Refuse runs of other lengths than those of the same row that `kept` holds.

    Raises:
        UserError: there is one; says how to make it fit.
    """
    former = {result.row: result.epochs for result in kept}
    for task in tasks:
        epochs, own = task.config.optimisation.epochs, former.get(task.row)
        if None not in (epochs, own) and not math.isclose(epochs, own, abs_tol=1e-4):
            raise UserError(
                f"row {task.row!r} has {own:g} epochs in {file} and {epochs:g} here; give --epochs"
                f" {own:g}, or another file as --results"
            )


def _given_lengths(
    sweep: Sweep,
    rows: Sequence[Variant],
    arguments: jsonargparse.Namespace,
    output: Path,
    kept: Sequence[Result],
) -> dict[str, int]:
    """Row's name → its updates, where its seconds are given.

    Raises:
        UserError: `--epochs` is given, too; or :func:`studies.sweeps.lengths.lengths_by_pace`
            raises it.
    """
    timed = [row for row in rows if isinstance(row.length, GivenSeconds)]
    if not timed:
        return {}
    if arguments.epochs is not None:
        raise UserError(
            f"--epochs is {arguments.epochs}, but the length of row {timed[0].name!r} is"
            f" {timed[0].length.seconds:g} seconds; leave --epochs out, or select"
            " other rows by --rows"
        )
    configs = {task.row: task.config for task in _tasks(sweep, timed, arguments, output)}
    seconds = {row.name: row.length.seconds for row in timed}
    lengths = lengths_by_pace(configs, seconds, output, kept)
    return {name: lengths[name]["updates"] for name in configs}


def _tasks(
    sweep: Sweep,
    rows: Sequence[Variant],
    arguments: jsonargparse.Namespace,
    output: Path,
    lengths: Mapping[str, int] = MappingProxyType({}),
) -> list[Task]:
    """The runs of rows; `lengths` are the updates of those that have no length of their own."""
    overrides = {} if arguments.epochs is None else {"epochs": arguments.epochs}
    if arguments.patch_size is not None:
        overrides["arguments"] = {"patch_size": arguments.patch_size}
    tasks = []
    # Seed by seed: whatever moment a reader looks, rows have seen about the same seeds.
    for seed in dict.fromkeys(arguments.seeds):
        for row in rows:
            config = sweep.config(row, seed, output, overrides)
            if row.name in lengths:
                config = change(config, of_updates(lengths[row.name], config))
            accuracy = sweep.accuracy if row.has_accuracy else None
            tasks.append(
                Task(sweep.name, row.name, config, arguments.command, sweep.examine, accuracy)
            )
    return tasks


def _later_tasks(
    sweep: Sweep,
    rows: Sequence[Variant],
    arguments: jsonargparse.Namespace,
    output: Path,
    kept: Sequence[Result],
) -> list[Task]:
    """The runs of rows whose length or weights follow from finished runs of others.

    Raises:
        UserError: there is no finished run of such another row.
    """
    names = {name for row in rows for name in row.needs}
    timed = _tasks(sweep, sweep.find(sorted(names)), arguments, output)
    ended = [finished(task.config) for task in timed]
    results = [*kept, *(result for result in ended if result is not None)]
    updates = shares_of_updates(rows, results)
    same = {row.name: row.length.row for row in rows if isinstance(row.length, SameSeconds)}
    if same:
        tasks = [*timed, *_tasks(sweep, sweep.find(list(same)), arguments, output)]
        configs = {task.row: task.config for task in tasks}
        lengths = lengths_by_pace(configs, same, output, results)
        updates |= {name: lengths[name]["updates"] for name in same}
    return _tasks(sweep, rows, arguments, output, updates)


@contextmanager
def _progress(count: int) -> Iterator[Callable[[Task, Outcome], None]]:
    console = plain_console(stderr=True)
    bar = Progress(
        TextColumn("{task.completed}/{task.total} runs"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        speed_estimate_period=3600,  # a run takes a minute
        disable=not sys.stderr.isatty(),
    )
    with bar:
        shown = bar.add_task("", total=count)

        def on_end(task: Task, outcome: Outcome) -> None:
            told = _told(outcome) if isinstance(outcome, Result) else f"{_name(task)} failed"
            bar.update(shown, advance=1, description=told)
            if bar.disable:
                _LOGGER.info("%s", told)

        yield on_end


def _name(task: Task) -> str:
    return f"{task.row}, seed {task.config.run.seed}"


def _tell(failures: Sequence[Failure]) -> None:
    for failure in failures:
        _LOGGER.error("%s", _told(failure))


def _told(outcome: Outcome) -> str:
    if isinstance(outcome, Result):
        accuracy = ACCURACIES[SWEEPS[outcome.sweep].accuracy]
        shown = "" if math.isnan(right := outcome.test_accuracy) else f"{accuracy} {right:.1%}, "
        return (
            f"{outcome.row}, seed {outcome.seed}: {shown}"
            f"test loss {outcome.test_loss:.3f}, {outcome.seconds:.0f} s"
        )
    lines = "\n".join(f"  {line}" for line in outcome.last_lines)
    return (
        f"{_name(outcome.task)} failed with exit code {outcome.exit_code}; its log "
        f"{outcome.log} ends:\n{lines}"
    )


def _list(sweep: Sweep) -> None:
    table = Table(title=f"python -m studies sweep {sweep.name}", caption=sweep.caveat)
    for heading in ("row", "changes", "shown in"):
        table.add_column(heading)
    for row in sweep.rows:
        places = [panel.title for panel in sweep.panels if row.name in panel.rows.values()]
        table.add_row(row.name, changes(sweep, row.name), "; ".join(places))
    print_whole(table)


def _show(sweep: Sweep, results: Sequence[Result]) -> None:
    for headings, lines in all_tables(sweep, results):
        print_figures(headings, lines, names=2)
    plain_console().print(describe(sweep, results), highlight=False, soft_wrap=True)
