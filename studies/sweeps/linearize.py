"""A DeiT whose attention became inner models: accuracy by further training, on Fashion-MNIST.

Bars: 99 % of the DeiT's accuracy within 10 % of its training time, and as much within
20 %.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from studies.sweeps import TITLES
from studies.sweeps.definition import Column, Panel, ShareOfUpdates, Sweep, Variant
from studies.sweeps.paces import cpu_seconds_of_an_update
from studies.sweeps.tables import ACCURACIES, by_row, values_of

if TYPE_CHECKING:
    from studies.sweeps.results import Result
    from vision_ttt.engine.train import TrainResult

TEACHER = "deit"
"""The row of the DeiT that the others start from."""
SHARES = (5, 10, 20)
"""Lengths of the other rows, in % of the DeiT's updates."""
INNER = {"swiglu": "SwiGLU", "ttt_linear": "TTT-Linear", "vit3": "ViT³"}
"""Inner model → its name in tables."""

_DEIT = {
    "model": "deit_tiny_patch16_224",
    "arguments": {"patch_size": 4, "embed_dim": 96, "depth": 5, "num_heads": 3},
}
# The moving average would lag behind in a short run.
_SHORT: dict[str, Any] = {"ema_decay": 0.0, "drop_path": 0.0}
# The inherited weights learn at a fifth of the DeiT's rate, the inner models at twice that rate. It
# lies between three settings that differed little after 200 updates, on held-out training images.
_TUNED = {**_SHORT, "learning_rate": 4e-4, "minimum_learning_rate": 4e-6}
KINDS = {
    **{f"{label}, linearised": (inner, True) for inner, label in INNER.items()},
    **{f"{label}, from scratch": (f"{inner}-scratch", False) for inner, label in INNER.items()},
    "DeiT, continued": (TEACHER, True),
}
"""Label → the rows' name without their share, and whether they start from the DeiT."""


def linear(deit: Mapping[str, Any], inner: str) -> dict[str, Any]:
    """The fields that name a DeiT's linear counterpart, given those that name the DeiT."""
    arguments = {"base": deit["model"], **deit["arguments"], "inner": inner}
    return {"model": "linear_vit", "arguments": arguments}


def rows_by_share(
    deit: Mapping[str, Any],
    tuned: Mapping[str, Any],
    scratch: Mapping[str, Any],
    shares: Sequence[int],
) -> tuple[Variant, ...]:
    """The rows of `KINDS`, for shares of the DeiT's updates in %.

    Args:
        deit: the fields that name the DeiT.
        tuned: those of rows that start from it.
        scratch: those of rows that do not.
    """
    rows = []
    for share in shares:
        for kind, starts in KINDS.values():
            inner = kind.partition("-")[0]
            model = deit if kind == TEACHER else linear(deit, inner)
            own = {} if kind == TEACHER or not starts else {"new_parameters_rate": 10}
            rows.append(
                Variant(
                    f"{kind}-{share}",
                    {**model, **(tuned if starts else scratch), **own},
                    length=ShareOfUpdates(TEACHER, share / 100),
                    start=TEACHER if starts else None,
                )
            )
    return tuple(rows)


def panels_by_share(shares: Sequence[int]) -> tuple[Panel, ...]:
    """A panel for each share, with the DeiT in all of them."""
    return tuple(
        Panel(
            f"{share} % of the DeiT's updates",
            {"DeiT": TEACHER, **{label: f"{kind}-{share}" for label, (kind, _) in KINDS.items()}},
        )
        for share in shares
    )


def _accuracy(result: Result) -> float:
    return result.test_accuracy


def _update(result: Result) -> float:
    return 1000 * result.measured["cpu_seconds_of_an_update"]


def _training(result: Result) -> float:
    return _update(result) * result.curve["update"][-1]


def examine(trained: TrainResult) -> dict[str, float]:
    """The CPU time of an update, which other work changes less than it changes the seconds."""
    return {"cpu_seconds_of_an_update": cpu_seconds_of_an_update(trained.config)}


UPDATE = Column("CPU ms of an update", _update, 0, is_time=True)
"""Of what :func:`examine` measures."""
RELATIVE = (
    Column("accuracy, % of the DeiT's", _accuracy, 2, relative_to=TEACHER),
    Column("training, % of the DeiT's CPU time", _training, 1, relative_to=TEACHER),
)
"""Accuracy and training time, of what :func:`examine` measures."""


def linearize_figure(sweep: Sweep, results: Sequence[Result]) -> Figure:
    """Accuracy against training time, both in % of the DeiT's; points are seeds, lines their means.

    Raises:
        UserError: there are no results, or one is not of this sweep.
    """
    found = by_row(sweep, results)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    for place, (label, (kind, starts)) in enumerate(KINDS.items()):
        rows = [found[f"{kind}-{share}"] for share in SHARES if f"{kind}-{share}" in found]
        if not rows:
            continue
        accuracies, times = ([values_of(column, own, found) for own in rows] for column in RELATIVE)
        colour = f"C{len(INNER) if kind == TEACHER else place % len(INNER)}"
        means = [[statistics.fmean(each) for each in values] for values in (times, accuracies)]
        axis.plot(*means, "-" if starts else ":", marker="_", color=colour, label=label)
        for own_times, own in zip(times, accuracies, strict=True):
            axis.plot(own_times, own, ".", color=colour, alpha=0.5)
    for share, bar in ((10, 99), (20, 100)):
        axis.plot([0, share, share], [bar, bar, axis.get_ylim()[0]], "k--", linewidth=0.6)
    axis.set_xlabel("training time, % of the DeiT's")
    axis.set_ylabel(f"{ACCURACIES[sweep.accuracy]}, % of the DeiT's")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{sweep.title}\n{sweep.caveat}", fontsize=8, wrap=True)
    return figure


LINEARIZE_FASHION = Sweep(
    name="linearize-fashion",
    title=TITLES["linearize-fashion"],
    recipe="fashion-mnist",
    base={"epochs": 10, "warmup": 1},
    rows=(Variant(TEACHER, _DEIT), *rows_by_share(_DEIT, _TUNED, _SHORT, SHARES)),
    panels=panels_by_share(SHARES),
    caveat="Small-scale evidence: 0.6 million parameters, 49 tokens, images of 28² pixels; CPU "
    "time is that of updates on one thread, without reading the images.",
    columns=(*RELATIVE, UPDATE),
    examine=examine,
    draw=linearize_figure,
)
