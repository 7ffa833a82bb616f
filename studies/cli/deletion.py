"""`python -m studies deletion CHECKPOINT…`."""

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jsonargparse
import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.utils.data import IterableDataset

from studies.bench.page import replace_in
from studies.cli.pictures import check_picture, write_picture
from studies.deletion.curves import black, blurred, mean_colour
from studies.deletion.figures import deletion_figure
from studies.deletion.results import (
    DeletionResult,
    read_deletion_results,
    write_deletion_results,
)
from studies.deletion.study import RANDOM, measure_maps, methods_for
from studies.deletion.tables import (
    by_model,
    deletion_markdown,
    describe_deletion,
    panels,
    tabulate_deletion,
)
from vision_ttt import recipes, tasks
from vision_ttt.bench.machine import describe_run
from vision_ttt.cli.fast_model import fast_model
from vision_ttt.cli.plain_console import plain_console
from vision_ttt.cli.wide_table import print_figures
from vision_ttt.data import DatasetError, targets_of
from vision_ttt.errors import UserError
from vision_ttt.explain.feature_maps import token_grid
from vision_ttt.tasks.images.task import ImageTask

_LOGGER = logging.getLogger(__name__)
PAGE_NAME = "deletion-insertion"


def run(arguments: jsonargparse.Namespace) -> int:
    """Measure each checkpoint; show and keep the results."""
    check_picture(arguments.figure)
    results_file = Path(arguments.results)
    results = read_deletion_results(results_file) if results_file.exists() else []
    for checkpoint in arguments.checkpoints:
        measured = _measure(checkpoint, arguments)
        renewed = (checkpoint, measured[0].data)
        results = [each for each in results if (each.checkpoint, each.data) != renewed] + measured
        write_deletion_results(results_file, results)
    if not results:
        raise UserError(f"{results_file} holds no results; measure some first")
    text = deletion_markdown(results)
    _show(results)
    write_picture(deletion_figure(panels(results)), Path(arguments.figure), dpi=110)
    if arguments.page is not None:
        replace_in(Path(arguments.page), PAGE_NAME, text)
    _LOGGER.info("results in %s and %s", results_file, arguments.figure)
    return 0


def _measure(checkpoint: str, arguments: jsonargparse.Namespace) -> list[DeletionResult]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = describe_run(arguments.command, device)
    model, metadata = tasks.load_model(checkpoint)
    methods = methods_for(model)
    if arguments.methods is not None:
        unknown = [name for name in arguments.methods if name not in methods]
        if unknown:
            raise UserError(
                f"--methods has {', '.join(unknown)}; {checkpoint} holds a {type(model).__name__},"
                f" of which there are {', '.join(methods)}"
            )
        methods = list(dict.fromkeys([RANDOM, *arguments.methods]))
    changes = {} if arguments.dataset is None else {"dataset": arguments.dataset}
    task = tasks.find(metadata.task["name"]).reopen(
        metadata, changes, part="test", precision="float32", num_workers=0
    )
    chosen = _spread_items(task, arguments.images, arguments.classes)
    images, labels = (each.to(device) for each in chosen)
    try:
        (height, width), sides = token_grid(model, images)
    except TypeError as error:
        raise UserError(f"{checkpoint}: {error}") from error
    make = {
        "mean": lambda: mean_colour(images),
        "blur": lambda: blurred(images, max(sides)),
        "black": lambda: black(images, task.input["mean"], task.input["std"]),
    }
    fills = {name: make[name]() for name in dict.fromkeys(arguments.fills)}
    fast, _ = fast_model(model, device, "float32")
    with _progress(checkpoint, len(methods) * len(fills)) as advance:
        curves = measure_maps(
            *(model.to(device), images, labels),
            fills=fills,
            methods=methods,
            points=arguments.points,
            draws=arguments.draws,
            batch_size=arguments.batch_size,
            fast=fast,
            on_curve=advance,
        )
    shared = DeletionResult(
        data=task.source.dataset,
        model=metadata.model,
        checkpoint=checkpoint,
        seed=_seed(checkpoint),
        images=len(images),
        tokens=height * width,
        curves=curves[0],
        run=run,
    )
    return [dataclasses.replace(shared, curves=each) for each in curves]


def _spread_items(task: ImageTask, count: int, classes: list[str] | None) -> tuple[Tensor, Tensor]:
    """Up to `count` test images [N, 3, H, W] with their classes [N], spread over the test set.

    Raises:
        DatasetError: the images can only be read in order, or those of some classes only be found
            by reading all.
        ImageError: one does not decode.
        UserError: a class is unknown, or the test set has no image of the classes.
    """
    name = task.source.dataset
    if isinstance(task.test_set, IterableDataset):
        raise DatasetError(f"{name} can only be read in order; name a folder")
    chosen = np.arange(len(task.test_set))
    if classes is not None:
        if unknown := [each for each in classes if each not in task.classes]:
            raise UserError(
                f"--classes has {', '.join(unknown)}; the classes are {', '.join(task.classes)}"
            )
        targets = targets_of(task.data.test)
        if targets is None:
            raise DatasetError(f"{name} does not say its classes; leave --classes out")
        chosen = np.flatnonzero(np.isin(targets, [task.classes.index(each) for each in classes]))
        if not len(chosen):
            raise UserError(f"{name} has no test image of {', '.join(classes)}")
    places = chosen[np.linspace(0, len(chosen) - 1, min(count, len(chosen))).astype(int)]
    batch = task.collate([task.test_set[int(place)] for place in places])
    if batch["damaged"]:
        raise batch["damaged"][0]
    return batch["images"], batch["targets"]


def _seed(checkpoint: str) -> int | None:
    """The seed of the run that left a checkpoint, where its config lies beside it."""
    config = Path(checkpoint).parent / "config.yaml"
    return recipes.load(str(config)).run.seed if config.is_file() else None


@contextmanager
def _progress(name: str, count: int) -> Iterator[Callable[[], None]]:
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=plain_console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    with bar:
        shown = bar.add_task(name, total=count)
        yield lambda: bar.advance(shown)
    if bar.disable:
        _LOGGER.info("%s: %s orders with each fill", name, count)


def _show(results: list[DeletionResult]) -> None:
    for title, own in by_model(results).items():
        headings, lines = tabulate_deletion(own)
        print_figures(headings, lines, names=2, title=title)
    plain_console().print(describe_deletion(results), highlight=False, soft_wrap=True)
