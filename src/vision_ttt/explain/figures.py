"""Figures of a training run, as matplotlib Figures that need no display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor


def inner_loss_curves(history: Sequence[Mapping[str, Any]], *, narrow: bool = False) -> Figure:
    """Inner loss of every layer against the mini-batch, after the first, middle and last epoch.

    This is Vision-TTT's Fig. 11. A falling line means that the learner learns along the image.

    Args:
        history: per epoch "epoch" and "inner_losses", layer name → losses of the mini-batches.
        narrow: two panels per row, for a phone.
    """
    layers = list(history[-1]["inner_losses"])
    columns = min(2 if narrow else 4, len(layers))
    rows = -(-len(layers) // columns)
    width, height = (2.1, 1.9) if narrow else (3.2, 2.6)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    chosen = sorted({0, len(history) // 2, len(history) - 1})
    for axis, layer in zip(axes, layers, strict=False):
        for index in chosen:
            losses = history[index]["inner_losses"][layer]
            label = f"epoch {history[index]['epoch']}"
            axis.plot(range(1, len(losses) + 1), losses, marker=".", label=label)
        axis.set_title(layer.removesuffix(".mixer.ttt"), fontsize=9)
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    for axis in axes[len(layers) :]:
        axis.set_axis_off()
    axes[0].legend(frameon=False, fontsize=8)
    figure.supxlabel("mini-batch, in scan order")
    figure.supylabel("inner loss per token")
    return figure


def confusion_matrix(confusion: Tensor, classes: Sequence[str], *, narrow: bool = False) -> Figure:
    """Counts of predictions per true class; with numbers and names for few classes.

    Args:
        confusion: counts [C, C], row = true class, column = predicted class.
        classes: C names.
        narrow: at most four inches wide, for a phone.
    """
    counts = confusion.cpu().numpy()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    readable = len(classes) <= (10 if narrow else 30)
    side = min(3.6 if narrow else 9.0, 2.2 + 0.42 * len(classes))
    figure = Figure(figsize=(side + (0.4 if narrow else 0.8), side), layout="constrained")
    axis = figure.subplots()
    picture = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axis.set(xlabel="predicted", ylabel="true")
    figure.colorbar(picture, ax=axis, label="share of the true class", shrink=0.8)
    if readable:
        turned = 90 if max(map(len, classes)) > 2 else 0
        axis.set_xticks(range(len(classes)), classes, rotation=turned)
        axis.set_yticks(range(len(classes)), classes)
        for row, column in zip(*np.nonzero(counts), strict=True):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axis.text(
                *(column, row, int(counts[row, column])),
                ha="center",
                va="center",
                fontsize=8,
                color=colour,
            )
    return figure
