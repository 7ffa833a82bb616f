"""Figures of inner losses along the sequence, as matplotlib Figures that need no display."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from vision_ttt.explain.palette import line_style

if TYPE_CHECKING:
    from vision_ttt.explain.inner_losses import LossCourse

COURSES = {
    "initial": "ℓ(W₀; xₜ)  before any step",
    "before": "ℓ(Wₜ₋₁; xₜ)  before the token's step",
    "updated": "ℓ(Wₜ; xₜ)  after the token's step",
}
"""The losses of a :class:`vision_ttt.explain.LossCourse`, as legends name them."""

_MOST_COLUMNS = 4
_FADED = 0.25


def inner_loss_course_figure(
    courses: Mapping[str, LossCourse], *, window: int | None = None, title: str = ""
) -> Figure:
    """Inner loss at three states along the scan, a panel for each layer (TTT, Figs. 5 and 17).

    The three losses of a token are those at the initial state, at the state before its step and
    after its step. The gap between the first two shows what the learner has learnt from earlier
    tokens. The gap between the last two shows what one step teaches. With a window, thin lines are
    single tokens and thick lines are running means.

    Args:
        courses: of :func:`vision_ttt.explain.inner_loss_course`: the layer's name → its losses.
        window: tokens in a running mean; 1 for none, None for a 64th of the tokens.
        title: of the figure, e.g. the model's name.
    """
    figure, axes, window = _panels(courses, window)
    for axis, (layer, course) in zip(axes, courses.items(), strict=True):
        for index, (name, label) in enumerate(COURSES.items()):
            _course(axis, getattr(course, name), window, index, label)
        _describe(axis, layer)
    _finish(figure, axes, _along(window), title, columns=1 if len(courses) == 1 else 3)
    return figure


def inner_loss_comparison(
    models: Mapping[str, Mapping[str, LossCourse]], *, window: int | None = None
) -> Figure:
    """ℓ(W_{t−1}; x_t) of several models along the scan, a panel for each layer (VT, Fig. 11).

    With a model's checkpoints of several epochs it shows how training changes what the learners do.

    Args:
        models: the model's name → its layers' losses. Panels are of the layers in order, so that
            models of other names of layers compare, too; the names are those of the model with
            most layers.
        window: tokens in a running mean; 1 for none, None for a 64th of the tokens.
    """
    longest = max(models.values(), key=len)
    figure, axes, window = _panels(longest, window)
    for index, (model, courses) in enumerate(models.items()):
        for axis, course in zip(axes, courses.values(), strict=False):
            _course(axis, course.before, window, index, model)
    for axis, layer in zip(axes, longest, strict=True):
        _describe(axis, layer)
    title = "ℓ(Wₜ₋₁; xₜ), before the token's step"
    _finish(figure, axes, _along(window), title, columns=4)
    return figure


def inner_loss_training_figure(
    checkpoints: Mapping[int, Mapping[str, LossCourse]], *, unit: str
) -> Figure:
    """Inner loss at three states over the training, a panel for each layer (VT, Fig. 11).

    Each is the mean over the tokens of the scan. The gap between the first two shows what the
    learner has learnt from earlier tokens. The gap between the last two shows what one step
    teaches.

    Args:
        checkpoints: how long a model was trained → its layers' losses then, of
            :func:`vision_ttt.explain.inner_loss_course`.
        unit: of the training: "epoch" or "update".
    """
    trained = sorted(checkpoints)
    layers = checkpoints[trained[0]]
    figure, axes, _ = _panels(layers, window=1)
    for axis, layer in zip(axes, layers, strict=True):
        for index, (name, label) in enumerate(COURSES.items()):
            means = [getattr(checkpoints[at][layer], name).mean().item() for at in trained]
            axis.plot(trained, means, marker=".", label=label, **line_style(index))
        _describe(axis, layer)
    _finish(figure, axes, unit, "", columns=len(COURSES))
    return figure


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of the up to ``window`` values around each of ``values`` [T]."""
    sums = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    places = np.arange(len(values))
    first = np.maximum(places - (window - 1) // 2, 0)
    stop = np.minimum(places + window // 2 + 1, len(values))
    return (sums[stop] - sums[first]) / (stop - first)


def layer_name(name: str) -> str:
    """A layer's name in a panel's title: of ``blocks.3.mixer.ttt`` "block 4"."""
    parts = name.split(".")
    places = [i for i, part in enumerate(parts[:-1]) if part in ("blocks", "layers")]
    place = places[0] if places else -1
    if place < 0 or not parts[place + 1].isdecimal():
        return name
    stage = f"stage {int(parts[1]) + 1}, " if parts[0] == "stages" else ""
    return f"{stage}block {int(parts[place + 1]) + 1}"


def _panels(
    courses: Mapping[str, LossCourse], window: int | None
) -> tuple[Figure, list[Axes], int]:
    """A figure with an axis for each layer, and the tokens in a running mean."""
    if window is None:
        window = max(len(next(iter(courses.values())).before) // 64, 1)
    columns = min(_MOST_COLUMNS, len(courses))
    rows = -(-len(courses) // columns)
    size = (max(2.3 * columns, 4.2) + 0.3, 1.85 * rows + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    return figure, panels(figure, rows, columns, len(courses)), window


def panels(figure: Figure, rows: int, columns: int, count: int, **shared: bool) -> list[Axes]:
    """``count`` axes in rows; what is left of the last row stays empty."""
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axis in axes[count:]:
        axis.set_axis_off()
    return axes[:count]


def _course(axis: Axes, losses: Tensor, window: int, index: int, label: str) -> None:
    """Draw the losses [T] in the style of line number ``index``."""
    values, style = losses.detach().float().cpu().numpy(), line_style(index)
    tokens = np.arange(1, len(values) + 1)
    if window > 1:
        axis.plot(tokens, values, color=style["color"], alpha=_FADED, linewidth=0.6)
    axis.plot(tokens, running_mean(values, window), linewidth=1.4, label=label, **style)


def _describe(axis: Axes, layer: str) -> None:
    axis.set_title(layer_name(layer), fontsize=9)
    axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=7)
    axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axis.grid(alpha=0.3)


def _along(window: int) -> str:
    smoothed = f"\n(thick: mean of {window})" if window > 1 else ""
    return f"token, in scan order{smoothed}"


def _finish(figure: Figure, axes: list[Axes], along: str, title: str, *, columns: int) -> None:
    for axis in axes[-_MOST_COLUMNS:]:  # the last of each column
        axis.set_xlabel(along, fontsize=8)
    figure.supylabel("inner loss ½‖f(k) − v‖²", fontsize=9)
    add_legend(figure, axes[0], title, columns)


def add_legend(figure: Figure, axis: Axes, title: str, columns: int) -> None:
    """Put a title above all panels, and the names of an axis' lines below them."""
    if title:
        figure.suptitle(title, fontsize=10)
    lines, labels = axis.get_legend_handles_labels()
    figure.legend(
        lines, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )
