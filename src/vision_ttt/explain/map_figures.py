"""Figures of gradient magnitude maps, as matplotlib Figures that need no display."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from vision_ttt.explain.gradient_maps import top_fraction
from vision_ttt.explain.token_pixels import drawn_proportion, padded, picture_patch, spread

_COLOURS = "magma"


def plot_gradient_maps(
    images: Tensor,
    maps: Tensor,
    titles: Sequence[str] | None = None,
    *,
    fraction: float = 0.3,
    patch: tuple[int, int] | None = None,
) -> Figure:
    """A row for each image: the image, its map over the image, and its top tokens only.

    ``plot_gradient_maps(images, maps).savefig("maps.png")`` saves the figure; a notebook displays
    it. Each map has a colour scale of its own, from its smallest to its largest number.

    Args:
        images: [B, 3, H, W] or [B, 1, H, W] in [0, 1], not normalised.
        maps: [B, h, w], see :func:`vision_ttt.explain.mean_map`.
        titles: one per image, or None.
        fraction: share of the tokens in the last picture, in (0, 1].
        patch: rows and columns of pixels from token to token, see
            :func:`vision_ttt.explain.feature_maps.token_step`: needed where the model pads a side
            by as many pixels as tokens or more, and where patches overlap. By default the smallest
            that cover the image.

    Raises:
        ValueError: the numbers of images, maps and titles differ or are 0, an image has other
            channels or is smaller than its map, the fraction is out of its range, or a token has no
            pixel with this patch.
    """
    titles = [""] * len(images) if titles is None else titles
    pictures, marked, extent = _prepared(images, maps, titles, fraction, patch)
    rows, (_, width, height, _) = len(images), extent
    figure = Figure(
        figsize=(9, 3 * drawn_proportion((height, width)) * rows + 0.4), layout="constrained"
    )
    axes = figure.subplots(rows, 3, squeeze=False)
    _bare(axes)
    for row, title in enumerate(titles):
        plain, over, top = axes[row]
        plain.imshow(pictures[row], extent=extent)
        over.imshow(pictures[row].mean(-1), cmap="gray", vmin=0, vmax=1, extent=extent)
        shown = maps[row].cpu().numpy()
        over.imshow(shown, cmap=_COLOURS, extent=extent, interpolation="bilinear", alpha=0.7)
        top.imshow(marked[row], extent=extent)
        plain.set_ylabel(title)
    for axis, name in zip(axes[0], ("image", "‖G‖", _share(fraction)), strict=True):
        axis.set_title(name)
    return figure


def gradient_map_sheet(
    images: Tensor,
    maps: Tensor,
    titles: Sequence[str],
    *,
    per_row: int = 10,
    patch: tuple[int, int] | None = None,
) -> Figure:
    """Images with their gradient magnitude maps: image, map, and its top 30 % of tokens.

    This is Vision-TTT's Fig. 9 and 10, for many small images. Each map has a colour scale of its
    own.

    Args:
        images: [B, 3, H, W] or [B, 1, H, W] in [0, 1], not normalised.
        maps: [B, h, w], see :func:`vision_ttt.explain.mean_map`.
        titles: one per image.
        per_row: the number of images in a row.
        patch: as in :func:`plot_gradient_maps`.

    Raises:
        ValueError: the numbers of images, maps and titles differ or are 0, an image has other
            channels or is smaller than its map, or a token has no pixel with this patch.
    """
    pictures, marked, extent = _prepared(images, maps, titles, 0.3, patch)
    columns = min(per_row, len(images))
    groups = -(-len(images) // columns)
    figure = Figure(figsize=(1.05 * columns + 0.9, 3.4 * groups), layout="constrained")
    axes = figure.subplots(3 * groups, columns, squeeze=False)
    _bare(axes)
    for index, title in enumerate(titles):
        group, column = divmod(index, columns)
        image_axis, map_axis, mark_axis = axes[3 * group : 3 * group + 3, column]
        image_axis.imshow(pictures[index], extent=extent)
        image_axis.set_title(title, fontsize=8)
        shown = maps[index].cpu().numpy()
        map_axis.imshow(shown, cmap=_COLOURS, extent=extent, interpolation="bicubic")
        mark_axis.imshow(marked[index], extent=extent)
    for group in range(groups):
        for row, label in enumerate(("image", "‖G‖", _share(0.3))):
            axes[3 * group + row, 0].set_ylabel(label, fontsize=8)
    return figure


def _prepared(
    images: Tensor,
    maps: Tensor,
    titles: Sequence[str],
    fraction: float,
    patch: tuple[int, int] | None,
) -> tuple[np.ndarray, np.ndarray, tuple[int, int, int, int]]:
    """Pictures [B, H', W', 3], the same darkened except for the top tokens, and their extent.

    H' and W' are whole tokens: an image that the model padded is padded here, too.
    """
    if not titles or maps.shape[1] > images.shape[2] or maps.shape[2] > images.shape[3]:
        raise ValueError(
            "there must be images, each at least as large as its map; got images "
            f"{list(images.shape)} and maps {list(maps.shape)}"
        )
    if not len(images) == len(maps) == len(titles):
        raise ValueError(
            f"images, maps and titles must be equally many, got {len(images)}, {len(maps)}, "
            f"{len(titles)}"
        )
    if images.shape[1] not in (1, 3):
        raise ValueError(f"images must have 1 or 3 channels, got {list(images.shape)}")
    grid = maps.shape[1:]
    patch = picture_patch(patch, images.shape[2:], grid)
    images = padded(images.detach().float().clamp(0, 1), grid, patch).expand(-1, 3, -1, -1)
    height, width = images.shape[2:]
    pictures = images.permute(0, 2, 3, 1).cpu().numpy()
    marks = spread(top_fraction(maps, fraction).cpu(), (height, width), patch)
    marked = np.where(marks[..., None].numpy(), 0.25 + 0.75 * pictures, 0.25 * pictures)
    return pictures, marked, (0, width, height, 0)


def _bare(axes: np.ndarray) -> None:
    axis: Axes
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.set_frame_on(False)


def _share(fraction: float) -> str:
    return f"top {100 * fraction:g} %"
