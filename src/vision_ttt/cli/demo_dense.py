"""`vision-ttt demo-dense`: segmentation and detection, learnt on rendered scenes in minutes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import jsonargparse
import torch
from rich.table import Table

from vision_ttt.bench.machine import describe_run
from vision_ttt.bench.tables import Table as Cells
from vision_ttt.cli.rendering_bar import rendering_bar
from vision_ttt.cli.run_report import report
from vision_ttt.cli.wide_table import print_whole
from vision_ttt.data.rendered_folder import SHEET_FILE
from vision_ttt.data.scene_annotations import ADE_CLASSES
from vision_ttt.data.scene_images import SPLITS
from vision_ttt.data.scene_sheet import contact_sheet
from vision_ttt.data.scenes import SceneSettings, render_scenes
from vision_ttt.demo_dense.results import (
    Finished,
    describe_result,
    find_finished,
    save_finished,
    write_scene_results,
)
from vision_ttt.demo_dense.runs import GOALS
from vision_ttt.demo_dense.tables import by_class, compare, describe_scene_runs, learning_curves
from vision_ttt.engine import Preempted, TrainConfig, train
from vision_ttt.engine.locks import alone_in
from vision_ttt.errors import UserError
from vision_ttt.explain.report import PageTable, Picture, Section, render_report
from vision_ttt.extras import require
from vision_ttt.files import atomic_file, write_text
from vision_ttt.tasks.images.pictures import with_legend
from vision_ttt.tasks.segmentation.pictures import class_colours

_LOGGER = logging.getLogger(__name__)
_FIGURES = {
    "classification": ("confusion",),
    "detection": ("overlays", "precision_recall"),
    "segmentation": ("overlays",),
}
"""Of each run's own figures, those that the page shows for its first seed."""
_UNLABELLED = (255, 255, 255)


def run(arguments: jsonargparse.Namespace) -> int:
    """Render, train what is not finished yet, and write the page."""
    require("dense", "vision-ttt demo-dense")
    output = Path(arguments.output)
    settings = SceneSettings(
        train_images=arguments.train_images,
        test_images=arguments.test_images,
        train_objects=arguments.train_objects,
        test_objects=arguments.test_objects,
    )
    try:
        with alone_in(output, wait=False):
            _render(output, settings)
            if arguments.render_only:
                return 0
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


def _render(output: Path, settings: SceneSettings) -> None:
    """Render the scenes, and a picture of some of them."""
    total = settings.train_images + settings.test_images
    with rendering_bar("scenes", total) as progress:
        render_scenes(output / "scenes", settings, progress)
    if not (output / SHEET_FILE).exists():
        colours = class_colours(ADE_CLASSES)
        sheet = contact_sheet(settings.seed, "train", settings.side, [_UNLABELLED, *colours])
        entries = list(zip(ADE_CLASSES, colours, strict=True))
        with atomic_file(output / SHEET_FILE) as file:
            with_legend(sheet, [*entries, ("without a class", _UNLABELLED)]).save(file, "PNG")
    _LOGGER.info("scenes in %s, some of them in %s", output / "scenes", output / SHEET_FILE)


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
    count = settings.count_objects if single else settings.count
    counts = {f"{split}_images": count(split) for split in SPLITS}
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
    pictures.append(
        Picture(
            "The scenes",
            "The first training scenes, and the class of each pixel below them.",
            (output / SHEET_FILE).read_bytes(),
        )
    )
    for task, runs in by_task.items():
        title = f"{task[0].upper()}{task[1:]}"
        table = compare(task, runs)
        _print(title, table)
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
        "vision-ttt demo-dense: rendered scenes",
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


def _print(title: str, cells: Cells) -> None:
    table = Table(title=title)
    for place, heading in enumerate(cells.headings):
        table.add_column(heading, justify="right" if place else "left")
    for line in cells.lines:
        table.add_row(*line)
    print_whole(table)
