"""Pre-training on masked images without labels, by the share of labels that fine-tuning has."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from studies.sweeps import TITLES
from studies.sweeps.definition import Column, Panel, ShareOfUpdates, Sweep, Variant
from studies.sweeps.linearize import examine
from studies.sweeps.tables import by_row

if TYPE_CHECKING:
    from studies.sweeps.results import Result

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


PRETRAINING_FASHION = Sweep(
    name="pretraining-fashion",
    title=TITLES["pretraining-fashion"],
    recipe="fashion-mnist",
    base={
        "model": "vittt_nano_patch4_32",
        "epochs": 4,
        "warmup": 0.25,
        "batch_size": 128,
        # Once an epoch of all images: one of few images has few updates.
        "evaluate_every": 468,
        # The moving average would lag behind in a short run.
        "ema_decay": 0.0,
    },
    rows=(
        Variant(
            PRETRAINING,
            {
                "dataset": "fashion-mnist",
                "image_size": 28,
                "crop_scale": 0.8,
                "horizontal_flip": 0.5,
            },
            recipe="digits-masked-images",
            has_accuracy=False,
            note="Without labels; its losses are mean absolute errors of masked patches",
        ),
        *(_row(kind, share) for share in LENGTHS for kind in KINDS),
    ),
    panels=(
        Panel("pre-training", {"masked images": PRETRAINING}),
        *(
            Panel(f"{share} % of the labels", {KINDS[kind]: f"{kind}-{share}" for kind in KINDS})
            for share in LENGTHS
        ),
    ),
    caveat="Small-scale evidence: 0.57 million parameters, 49 tokens, images of 28² pixels, one "
    "learning rate for all, not tuned. Each seed has images with labels of its own, the same in "
    "all rows. Equal length is equal updates; CPU time is that of an update on one thread, without "
    "reading the images.",
    columns=(
        Column("images", lambda result: result.train_images, 0),
        Column("epochs", lambda result: result.epochs, 1),
        Column("updates", lambda result: result.curve["update"][-1], 0),
        Column(
            "CPU ms of an update",
            lambda result: 1000 * result.measured["cpu_seconds_of_an_update"],
            0,
        ),
    ),
    examine=examine,
    draw=pretraining_figure,
)
