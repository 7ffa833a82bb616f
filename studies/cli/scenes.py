"""`python -m studies scenes`: backbones compared by what they learn on the rendered scenes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import jsonargparse
import torch

from studies.scenes.results import (
    Finished,
    describe_result,
    find_finished,
    save_finished,
    write_scene_results,
)
from studies.scenes.tables import GOALS, by_class, compare, describe_scene_runs, learning_curves
from vision_ttt.bench.machine import describe_run
from vision_ttt.cli.demo_dense import render, scene_settings
from vision_ttt.cli.run_report import report
from vision_ttt.cli.wide_table import print_figures
from vision_ttt.data.scene_images import SPLITS
from vision_ttt.data.scenes import SceneSettings
from vision_ttt.engine import Preempted, TrainConfig, train
from vision_ttt.engine.locks import alone_in
from vision_ttt.errors import UserError
from vision_ttt.explain.report import PageTable, Picture, Section, render_report
from vision_ttt.extras import require
from vision_ttt.files import write_text

_LOGGER = logging.getLogger(__name__)
_FIGURES = {
    "classification": ("confusion",),
    "detection": ("overlays", "precision_recall"),
    "segmentation": ("overlays",),
}
"""Of each run's own figures, those that the page shows for its first seed."""


def run(arguments: jsonargparse.Namespace) -> int:
    """Render, train what is not finished yet, and write the page."""
    require("dense", "python -m studies scenes")
    output, settings = Path(arguments.output), scene_settings(arguments)
    try:
        with alone_in(output, wait=False):
            render(output, settings)
            finished = [
                _finished_run(model, config, settings, arguments.command)
                for model, config in arguments.runs
            ]
            write_scene_results(Path(arguments.results), [each.result for each in finished])
            _show(output, finished)
    except BlockingIOError:
        raise UserError(
            f"another demo is at work in {output}; wait for it, or choose another output"
        ) from None
    except Preempted as preemption:
        _LOGGER.info("%s", preemption)
    return 0


def _finished_run(
    model: str, config: TrainConfig, settings: SceneSettings, command: Sequence[str]
) -> Finished:
    """Train a run, or go on with it, or find it finished."""
    finished = find_finished(config)
    if finished is not None:
        _LOGGER.info("finished before: %s", config.run.output)
        return finished
    _LOGGER.info("%s with %s, seed %d", config.task.name, model, config.run.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begun = describe_run(command, device)  # of the source as it is when the run begins
    trained = train(config, resume="auto", progress=True)
    report(trained)
    single = config.task.name == "classification"
    kind = "objects" if single else "images"
    counts = {f"{split}_images": settings.count(split, kind) for split in SPLITS}
    side = settings.object_side if single else settings.side
    result = describe_result(model, side, counts, trained, begun)
    classes = trained.task.figures(trained.evaluation)["classes"]
    save_finished(config, result, classes, trained.metrics["history"])
    return Finished(result, classes, trained.metrics["history"], trained.run_dir)


def _show(output: Path, finished: Sequence[Finished]) -> None:
    """Write the page, and print the comparison."""
    by_task: dict[str, list[Finished]] = {}
    for each in finished:
        by_task.setdefault(each.result.task, []).append(each)
    tables, pictures = [], []
    for task, runs in by_task.items():
        title = f"{task[0].upper()}{task[1:]}"
        table = compare(task, runs)
        print_figures(*table, title=title)
        tables.append(PageTable(title, describe_scene_runs(runs), *table))
        tables.append(
            PageTable(
                f"{title} by class",
                "On the held-out images, mean ± sample standard deviation over seeds.",
                *by_class(task, runs),
            )
        )
        pictures.append(
            Section(
                f"{title}: learning curves",
                "A line per run. The metrics are of the held-out images; dotted: what is asked"
                " for.",
                learning_curves(task, runs),
                learning_curves(task, runs, narrow=True),
            )
        )
        pictures += _figures_of_runs(title, task, runs)
    page = output / "report.html"
    configurations = "\n".join(
        f"# {each.folder}\n{(each.folder / 'config.yaml').read_text(encoding='utf-8')}"
        for each in _first_seeds(finished)
    )
    text = render_report(
        "Backbones compared on rendered scenes",
        _summary(by_task),
        pictures,
        configurations,
        tables,
    )
    write_text(page, text)
    _LOGGER.info("report in %s", page)


def _figures_of_runs(title: str, task: str, runs: Sequence[Finished]) -> list[Picture]:
    """Pictures that the runs of each model's first seed have drawn."""
    return [
        Picture(
            f"{title}: {name.replace('_', ' ')}, {each.result.model}",
            f"Of seed {each.result.seed}; {each.folder / 'report.html'} has more.",
            (each.folder / f"{name}.png").read_bytes(),
        )
        for name in _FIGURES[task]
        for each in _first_seeds(runs)
    ]


def _first_seeds(runs: Sequence[Finished]) -> list[Finished]:
    """Of each task and model the run that comes first."""
    first: dict[tuple[str, str], Finished] = {}
    for each in runs:
        first.setdefault((each.result.task, each.result.model), each)
    return list(first.values())


def _summary(by_task: Mapping[str, Sequence[Finished]]) -> dict[str, str]:
    """The head of the page: for each model's first run what it reached, beside what is asked."""
    summary = {}
    for task, runs in by_task.items():
        for each in _first_seeds(runs):
            figures = [
                f"{goal.title} {getattr(each.result, goal.metric):.1%} (asked for: {goal.bar:.0%})"
                for goal in GOALS[task]
            ]
            name = f"{task}, {each.result.model}, seed {each.result.seed}"
            summary[name] = f"{', '.join(figures)}; {each.result.seconds:.0f} s of training"
    return summary
