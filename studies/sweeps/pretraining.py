"""Pre-training without labels, by the share of labels that fine-tuning has."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from studies.lite0 import MODEL, WEIGHTS
from studies.sweeps import TITLES
from studies.sweeps.backbones import measure_defects
from studies.sweeps.definition import Column, Panel, ShareOfUpdates, Sweep, Variant
from studies.sweeps.linearize import UPDATE, examine
from studies.sweeps.tables import by_row

if TYPE_CHECKING:
    from studies.sweeps.results import Result
    from vision_ttt.engine.train import TrainResult

MASKED, DISTILLED = "masked", "distilled"
"""The rows whose weights fine-tuning starts from."""
LENGTHS = {1: 0.06, 10: 0.25, 100: 0.5}
"""Share of the labels in % → updates of fine-tuning over those of a pre-training."""
PRETRAINED = {
    MASKED: ("fine-tuned", "masked images, fine-tuned"),
    DISTILLED: ("distilled", "distilled, fine-tuned"),
}
"""Row of the pre-training → the fine-tuned rows' name without their share, and their label."""
FROM_SCRATCH = {
    "scratch": "from scratch, as long as both",
    "scratch-short": "from scratch, as long as fine-tuning",
}
"""The rows' name without their share → their label."""
KINDS = {**dict(PRETRAINED.values()), **FROM_SCRATCH}


def _row(kind: str, share: int, start: str | None) -> Variant:
    length = LENGTHS[share] + (kind == "scratch")
    return Variant(
        f"{kind}-{share}",
        {} if share == 100 else {"train_fraction": share / 100},
        length=ShareOfUpdates(MASKED, length),
        start=start,
        seeded=() if share == 100 else ("split_seed",),
    )


def _of_classes(result: Result, measure: str) -> float:
    return math.nan if result.row in PRETRAINED else result.measured[measure]


def pretraining_figure(sweep: Sweep, results: Sequence[Result]) -> Figure:
    """Accuracy by the share of labels; points are seeds, lines go through their means.

    Raises:
        UserError: there are no results, or one is not of this sweep.
    """
    found = by_row(sweep, results)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for place, (kind, label) in enumerate(KINDS.items()):
        line = ":" if kind in FROM_SCRATCH else "-"
        accuracies = {
            share: [100 * result.test_accuracy for result in found[f"{kind}-{share}"]]
            for share in LENGTHS
            if f"{kind}-{share}" in found
        }
        if not accuracies:
            continue
        means = [statistics.fmean(values) for values in accuracies.values()]
        axis.plot(list(accuracies), means, line, color=f"C{place}", label=label)
        for share, values in accuracies.items():
            axis.plot([share] * len(values), values, ".", color=f"C{place}", alpha=0.6)
    axis.set_xscale("log")
    axis.set_xticks(list(LENGTHS))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("share of the labels, % (log)")
    axis.set_ylabel("test accuracy, %")
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{sweep.title}\n{sweep.caveat}", fontsize=8, wrap=True)
    return figure


def _compare(
    name: str,
    base: Mapping[str, Any],
    caveat: str,
    masked: Mapping[str, Any],
    distilled: Mapping[str, Any] | None = None,
    **others: Any,
) -> Sweep:
    """The sweep of a recipe's images.

    Args:
        base: of every row, but for what all such sweeps have.
        caveat: its beginning.
        masked: of the pre-training on masked images, whose recipe is that of the digits.
        distilled: of the distillation, likewise; None for none.
    """
    pretrained = [
        Variant(
            MASKED,
            masked,
            recipe="digits-masked-images",
            has_accuracy=False,
            note="Without labels; its losses are mean absolute errors of masked patches",
        )
    ]
    if distilled is not None:
        note = "Without labels; its losses are smooth L1 distances from the teacher's features"
        pretrained.append(
            Variant(DISTILLED, distilled, recipe="digits-distill", has_accuracy=False, note=note)
        )
    starts = {PRETRAINED[row.name][0]: row.name for row in pretrained}
    kinds = {kind: label for kind, label in KINDS.items() if kind in (*starts, *FROM_SCRATCH)}
    return Sweep(
        name=name,
        title=TITLES[name],
        # The moving average would lag behind in a short run.
        base={**base, "ema_decay": 0.0},
        rows=(
            *pretrained,
            *(_row(kind, share, starts.get(kind)) for share in LENGTHS for kind in kinds),
        ),
        panels=(
            Panel("pre-training", {row.name: row.name for row in pretrained}),
            *(
                Panel(
                    f"{share} % of the labels",
                    {label: f"{kind}-{share}" for kind, label in kinds.items()},
                )
                for share in LENGTHS
            ),
        ),
        caveat=f"Small-scale evidence: {caveat}, one learning rate for all rows with labels, not"
        " tuned. Each seed has images with labels of its own, the same in all rows. Equal length is"
        " equal updates; CPU time is that of an update on one thread, without reading the images.",
        draw=pretraining_figure,
        **others,
    )


_COLUMNS = (
    Column("images", lambda result: result.train_images, 0),
    Column("epochs", lambda result: result.epochs, 1),
    Column("updates", lambda result: result.curve["update"][-1], 0),
    UPDATE,
)

PRETRAINING_FASHION = _compare(
    "pretraining-fashion",
    {
        "model": "vittt_nano_patch4_32",
        "image_size": 28,
        "epochs": 4,
        "warmup": 0.25,
        "batch_size": 128,
        # Once an epoch of all images: one of few images has few updates.
        "evaluate_every": 468,
    },
    "0.57 million parameters, 49 tokens, images of 28² pixels",
    masked={"dataset": "fashion-mnist", "crop_scale": 0.8, "horizontal_flip": 0.5},
    recipe="fashion-mnist",
    columns=_COLUMNS,
    examine=examine,
)


def examine_defects(trained: TrainResult) -> dict[str, Any]:
    """Of classifiers the measures of two classes of unequal size, beside the CPU time."""
    classifies = trained.config.task.name == "classification"
    return {**examine(trained), **(measure_defects(trained) if classifies else {})}


_CELLS = {"dataset": "elpv", "model": "vittt_nano_patch8_256", "horizontal_flip": 0.5}
PRETRAINING_ELPV = _compare(
    "pretraining-elpv",
    {
        "image_size": 144,
        "epochs": 12,
        "warmup": 1,
        "batch_size": 16,
        "evaluate_every": 524,
    },
    "0.61 million parameters, 324 tokens, images of 144² pixels, a split of its own for each seed",
    masked=_CELLS,
    distilled={
        **_CELLS,
        "teacher": MODEL,
        "teacher_weights": str(WEIGHTS),
        "teacher_size": 144,
        "match": "tokens",
    },
    recipe="elpv",
    seeded=("seed", "split_seed"),
    columns=(
        *_COLUMNS,
        Column("balanced, %", lambda result: 100 * _of_classes(result, "balanced_accuracy"), 1),
        Column("ROC-AUC", lambda result: _of_classes(result, "roc_auc"), 3),
    ),
    examine=examine_defects,
)
