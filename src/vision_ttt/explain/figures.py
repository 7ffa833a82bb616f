"""Figures of a run and of what its model attends to, as matplotlib Figures that need no display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor
from torch.nn import functional as F

from vision_ttt.explain.gradient_maps import top_fraction


def training_curves(history: Sequence[Mapping[str, Any]]) -> Figure:
    """Losses, accuracy and mean inner loss against the epoch.

    Args:
        history: per epoch a mapping with "epoch", "train_loss", "test_loss", "test_accuracy" and
            "inner_loss" (None for models without TTT layers).
    """
    epochs = [row["epoch"] for row in history]
    has_inner = any(row["inner_loss"] is not None for row in history)
    figure = Figure(figsize=(4.2 * (2 + has_inner), 3.4), layout="constrained")
    axes = figure.subplots(1, 2 + has_inner, squeeze=False)[0]

    axes[0].plot(epochs, [row["train_loss"] for row in history], marker=".", label="training")
    axes[0].plot(epochs, [row["test_loss"] for row in history], marker=".", label="test")
    axes[0].set(title="Cross-entropy", ylabel="nats per image")
    axes[0].legend(frameon=False)

    accuracy = [100 * row["test_accuracy"] for row in history]
    axes[1].plot(epochs, accuracy, marker=".", color="tab:green")
    axes[1].set(title=f"Test accuracy: {accuracy[-1]:.1f} %", ylabel="% of test images")

    if has_inner:
        axes[2].plot(epochs, [row["inner_loss"] for row in history], marker=".", color="tab:purple")
        axes[2].set(title="Inner loss, mean over layers", ylabel="½‖f(k) − v‖² per token")
    for axis in axes:
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    return figure


def inner_loss_curves(history: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Inner loss of every layer against the mini-batch, after the first, middle and last epoch.

    The picture of Vision-TTT's Fig. 11. A falling line is a learner that learns along the image.

    Args:
        history: per epoch "epoch" and "inner_losses", layer name → losses of the mini-batches.

    Returns:
        The figure, or None where no layer has an inner loss.
    """
    layers = list(history[-1]["inner_losses"])
    if not layers:
        return None
    columns = min(4, len(layers))
    rows = -(-len(layers) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.6 * rows), layout="constrained")
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


def confusion_matrix(confusion: Tensor, classes: Sequence[str]) -> Figure:
    """Counts of predictions per true class; numbers and names where there is room for them.

    Args:
        confusion: counts [C, C], row = true class, column = predicted class.
        classes: C names.
    """
    counts = confusion.cpu().numpy()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    readable = len(classes) <= 30
    side = min(9.0, 2.2 + 0.42 * len(classes))
    figure = Figure(figsize=(side + 0.8, side), layout="constrained")
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


def gradient_map_sheet(
    images: Tensor, maps: Tensor, titles: Sequence[str], *, per_row: int = 10
) -> Figure:
    """Images beside their gradient magnitude maps: image, map, and its top 30 % of tokens.

    The picture of Vision-TTT's Fig. 9 and 10. Each map has a colour scale of its own.

    Args:
        images: [B, 3, H, W] in [0, 1].
        maps: [B, h, w], see :func:`gradient_magnitude_maps`.
        titles: one per image.
        per_row: images side by side.

    Raises:
        ValueError: the three differ in number, there are none, or a map is finer than its image.
    """
    if not titles or maps.shape[1] > images.shape[2] or maps.shape[2] > images.shape[3]:
        raise ValueError(
            "there must be images, none smaller than its map; got images "
            f"{list(images.shape)} and maps {list(maps.shape)}"
        )
    if not len(images) == len(maps) == len(titles):
        raise ValueError(
            f"images, maps and titles must be as many, got {len(images)}, {len(maps)}, "
            f"{len(titles)}"
        )
    # Where the model padded the image to whole patches, so is the picture.
    patch = [-(-images.shape[2 + axis] // maps.shape[1 + axis]) for axis in range(2)]
    height, width = patch[0] * maps.shape[1], patch[1] * maps.shape[2]
    rim = (0, width - images.shape[3], 0, height - images.shape[2])
    pictures = F.pad(images.clamp(0, 1), rim).permute(0, 2, 3, 1).cpu().numpy()
    marks = top_fraction(maps).cpu().numpy().repeat(patch[0], 1).repeat(patch[1], 2)
    extent = (0, width, height, 0)
    columns = min(per_row, len(images))
    groups = -(-len(images) // columns)
    figure = Figure(figsize=(1.05 * columns + 0.9, 3.4 * groups), layout="constrained")
    axes = figure.subplots(3 * groups, columns, squeeze=False)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.set_frame_on(False)
    for index, title in enumerate(titles):
        group, column = divmod(index, columns)
        image_axis, map_axis, mark_axis = axes[3 * group : 3 * group + 3, column]
        picture = pictures[index]
        image_axis.imshow(picture, extent=extent)
        image_axis.set_title(title, fontsize=8)
        map_axis.imshow(
            maps[index].cpu().numpy(), cmap="magma", extent=extent, interpolation="bicubic"
        )
        marked = np.where(marks[index, ..., None], 0.25 + 0.75 * picture, 0.25 * picture)
        mark_axis.imshow(marked, extent=extent)
    for group in range(groups):
        for row, label in enumerate(("image", "‖G‖", "top 30 %")):
            axes[3 * group + row, 0].set_ylabel(label, fontsize=8)
    return figure
