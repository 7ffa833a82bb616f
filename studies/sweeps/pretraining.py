"""Pre-training on masked images without labels, by the share of labels that fine-tuning has."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from studies.sweeps import TITLES
from studies.sweeps.backbones import measure_defects
from studies.sweeps.definition import Column, Panel, ShareOfUpdates, Sweep, Variant
from studies.sweeps.linearize import UPDATE, examine
from studies.sweeps.tables import by_row

if TYPE_CHECKING:
    from studies.sweeps.results import Result
    from vision_ttt.engine.train import TrainResult

PRETRAINING = "masked"
"""The row whose weights fine-tuning starts from."""
LENGTHS = {1: 0.06, 10: 0.25, 100: 0.5}
"""Share of the labels in % → updates of fine-tuning over those of the pre-training."""
KINDS = {
    "fine-tuned": "pre-trained, fine-tuned",
    "scratch": "from scratch, as long as both",
    "scratch-short": "from scratch, as long as fine-tuning",
}
"""The rows' name without their share → their label."""


def _row(kind: str, share: int) -> Variant:
    length = LENGTHS[share] + (kind == "scratch")
    return Variant(
        f"{kind}-{share}",
        {} if share == 100 else {"train_fraction": share / 100},
        length=ShareOfUpdates(PRETRAINING, length),
        start=PRETRAINING if kind == "fine-tuned" else None,
        seeded=() if share == 100 else ("split_seed",),
    )


def _of_classes(result: Result, measure: str) -> float:
    return math.nan if result.row == PRETRAINING else result.measured[measure]


def pretraining_figure(sweep: Sweep, results: Sequence[Result]) -> Figure:
    """Accuracy by the share of labels; points are seeds, lines go through their means.

    Raises:
        UserError: there are no results, or one is not of this sweep.
    """
    found = by_row(sweep, results)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for place, (kind, label) in enumerate(KINDS.items()):
        accuracies = {
            share: [100 * result.test_accuracy for result in found[f"{kind}-{share}"]]
            for share in LENGTHS
            if f"{kind}-{share}" in found
        }
        means = [statistics.fmean(values) for values in accuracies.values()]
        axis.plot(
            list(accuracies), means, "-" if place == 0 else ":", color=f"C{place}", label=label
        )
        for share, values in accuracies.items():
            axis.plot([share] * len(values), values, ".", color=f"C{place}", alpha=0.6)
    axis.set_xscale("log")
    axis.set_xticks(list(LENGTHS))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("share of the labels, % (log)")
    axis.set_ylabel("test accuracy, %")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{sweep.title}\n{sweep.caveat}", fontsize=8, wrap=True)
    return figure


def _compare(
    name: str, base: Mapping[str, Any], masked: Mapping[str, Any], caveat: str, **others: Any
) -> Sweep:
    """The sweep of a recipe's images.

    Args:
        base: of every row, but for what all such sweeps have.
        masked: of the pre-training, whose recipe is that of the digits.
        caveat: its beginning.
    """
    return Sweep(
        name=name,
        title=TITLES[name],
        # The moving average would lag behind in a short run.
        base={**base, "ema_decay": 0.0},
        rows=(
            Variant(
                PRETRAINING,
                masked,
                recipe="digits-masked-images",
                has_accuracy=False,
                note="Without labels; its losses are mean absolute errors of masked patches",
            ),
            *(_row(kind, share) for share in LENGTHS for kind in KINDS),
        ),
        panels=(
            Panel("pre-training", {"masked images": PRETRAINING}),
            *(
                Panel(
                    f"{share} % of the labels", {KINDS[kind]: f"{kind}-{share}" for kind in KINDS}
                )
                for share in LENGTHS
            ),
        ),
        caveat=f"Small-scale evidence: {caveat}, one learning rate for all, not tuned. Each seed"
        " has images with labels of its own, the same in all rows. Equal length is equal updates;"
        " CPU time is that of an update on one thread, without reading the images.",
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
    {"dataset": "fashion-mnist", "crop_scale": 0.8, "horizontal_flip": 0.5},
    "0.57 million parameters, 49 tokens, images of 28² pixels",
    recipe="fashion-mnist",
    columns=_COLUMNS,
    examine=examine,
)


def examine_defects(trained: TrainResult) -> dict[str, Any]:
    """Of classifiers the measures of two classes of unequal size, beside the CPU time."""
    classifies = trained.config.task.name == "classification"
    return {**examine(trained), **(measure_defects(trained) if classifies else {})}


PRETRAINING_ELPV = _compare(
    "pretraining-elpv",
    {
        "image_size": 144,
        "epochs": 12,
        "warmup": 1,
        "batch_size": 16,
        "evaluate_every": 524,
    },
    {"dataset": "elpv", "model": "vittt_nano_patch8_256", "horizontal_flip": 0.5},
    "0.61 million parameters, 324 tokens, images of 144² pixels, a split of its own for each seed",
    recipe="elpv",
    seeded=("seed", "split_seed"),
    columns=(
        *_COLUMNS,
        Column("balanced, %", lambda result: 100 * _of_classes(result, "balanced_accuracy"), 1),
        Column("ROC-AUC", lambda result: _of_classes(result, "roc_auc"), 3),
    ),
    examine=examine_defects,
)
