"""Figures of fast weights along an image, as matplotlib Figures that need no display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from vision_ttt.explain.inner_loss_figures import add_legend, layer_name, panels
from vision_ttt.explain.palette import line_style

if TYPE_CHECKING:
    from vision_ttt.explain.fast_weights import FastWeights

_QUANTITIES = {
    "drift": ("drift of the fast weights", "‖W − W₀‖ / ‖W₀‖", "mini-batches learnt"),
    "effective_rank": ("effective rank of the change", "of W − W₀", "mini-batches learnt"),
    "rates": ("inner learning rate", "η", "token, in scan order"),
}
"""Fields of :class:`FastWeights`: title, label of the values, of what they run along."""

_MOST_COLUMNS = 4
_DEPTH = "viridis"  # colour map of lines that have an order


def fast_weight_sheet(models: Mapping[str, Mapping[str, FastWeights]]) -> Figure:
    """Drift, effective rank and learning rate along the image: a row for each model.

    A line is the mean over a layer's heads; its colour is the layer's depth.

    Args:
        models: the model's name → :func:`vision_ttt.explain.fast_weights` of it, not empty.
    """
    deepest = max(map(len, models.values()))
    colours = mpl.colormaps[_DEPTH](np.linspace(0, 0.92, deepest))  # the last ones are too light
    figure = Figure(figsize=(7.4, 2.1 * len(models) + 0.6), layout="constrained")
    axes = figure.subplots(len(models), 3, squeeze=False, sharex="col")
    for row, (model, layers) in zip(axes, models.items(), strict=True):
        for axis, name in zip(row, _QUANTITIES, strict=True):
            for index, (layer, weights) in enumerate(layers.items()):
                values = _values(getattr(weights, name)).mean(0)
                _line(axis, name, values, color=colours[index], label=layer_name(layer))
            _describe(axis, name)
        row[0].set_ylabel(f"{model}\n{row[0].get_ylabel()}", fontsize=8)
    for top, bottom, (title, _, along) in zip(axes[0], axes[-1], _QUANTITIES.values(), strict=True):
        top.set_title(title, fontsize=9)
        bottom.set_xlabel(along, fontsize=8)
    legends = (row[0].get_legend_handles_labels() for row in axes)
    lines, labels = max(legends, key=lambda handles: len(handles[0]))
    figure.legend(
        lines, labels, loc="outside lower center", ncols=min(6, deepest), frameon=False, fontsize=7
    )
    return figure


def fast_weight_heads(
    layers: Mapping[str, FastWeights], quantity: str, *, heads: Sequence[str], title: str = ""
) -> Figure:
    """One quantity by head along the image, a panel for each layer.

    Args:
        layers: of :func:`vision_ttt.explain.fast_weights`.
        quantity: "drift", "effective_rank" or "rates".
        heads: names of the heads of every layer.
        title: of the figure, e.g. the model's name.
    """
    columns = min(_MOST_COLUMNS, len(layers))
    rows = -(-len(layers) // columns)
    size = (max(2.2 * columns, 4.2) + 0.3, 1.7 * rows + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    axes = panels(figure, rows, columns, len(layers), sharey=True)
    what, unit, along = _QUANTITIES[quantity]
    for axis, (layer, weights) in zip(axes, layers.items(), strict=True):
        values = _values(getattr(weights, quantity))
        for index, (head, own) in enumerate(zip(heads, values, strict=True)):
            _line(axis, quantity, own, label=head, **line_style(index))
        axis.set_title(layer_name(layer), fontsize=9)
    for axis in axes:  # after all lines, which share an axis
        _describe(axis, quantity)
        axis.set_ylabel("")
    for axis in axes[-_MOST_COLUMNS:]:  # the last of each column
        axis.set_xlabel(along, fontsize=8)
    figure.supylabel(f"{what}, {unit}", fontsize=9)
    add_legend(figure, axes[0], title, 6)
    return figure


def _values(values: Tensor) -> np.ndarray:
    return values.detach().float().cpu().numpy()


def _line(axis: Axes, quantity: str, values: np.ndarray, **look: object) -> None:
    # States are counted from the initial one, which has learnt nothing; tokens from the first.
    first = 1 if quantity == "rates" else 0
    axis.plot(np.arange(first, first + len(values)), values, linewidth=1.2, **look)


def _describe(axis: Axes, quantity: str) -> None:
    axis.set_ylabel(_QUANTITIES[quantity][1], fontsize=8)
    axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=7)
    axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axis.grid(alpha=0.3)
