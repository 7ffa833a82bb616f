"""Figures of gradient magnitude maps: of one model, or of several models, layers or heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from torch import Tensor

from vision_ttt.explain.gradient_maps import top_fraction
from vision_ttt.explain.palette import bare
from vision_ttt.explain.token_pixels import drawn_proportion, padded, picture_patch, spread

HEAT = "magma"
"""The colour map of heat over a picture: lightness rises with the value."""

_MOST_COLUMNS = 12
_WIDEST = 7.2  # inches: the text of a page of two columns


class PictureMap(NamedTuple):
    """A picture as a model saw it, and its map."""

    picture: Tensor
    """[3, H, W] in [0, 1], not normalised."""
    map: Tensor
    """[h, w]."""
    patch: tuple[int, int] | None = None
    """Rows and columns of pixels from token to token, see
    :func:`vision_ttt.explain.feature_maps.token_step`: needed where the model pads a side by as
    many pixels as tokens or more, and where patches overlap. By default the smallest that cover the
    picture."""


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
    it. It is the :func:`model_sheet` of one model.

    Args:
        images: [B, 3, H, W] or [B, 1, H, W] in [0, 1], not normalised.
        maps: [B, h, w], see :func:`vision_ttt.explain.mean_map`.
        titles: one per image, or None.
        fraction: share of the tokens in the last picture, in (0, 1].
        patch: as in :class:`PictureMap`.

    Raises:
        ValueError: the numbers of images, maps and titles differ or are 0, an image has other
            channels or is smaller than its map, the fraction is out of its range, or a token has no
            pixel with this patch.
    """
    titles = [""] * len(images) if titles is None else titles
    return model_sheet({"": _seen(images, maps, titles, patch)}, titles, fraction=fraction)


def gradient_map_sheet(
    images: Tensor,
    maps: Tensor,
    titles: Sequence[str],
    *,
    per_row: int = 10,
    patch: tuple[int, int] | None = None,
) -> Figure:
    """Many small images, each above its map and its top 30 % of tokens (Vision-TTT, Figs. 9, 10).

    Arguments and errors are those of :func:`plot_gradient_maps`; ``per_row`` is the number of
    images in a row. Each map has a colour scale of its own.
    """
    seen = _seen(images, maps, titles, patch)
    columns = min(per_row, len(seen))
    groups = -(-len(seen) // columns)
    figure = Figure(figsize=(1.05 * columns + 0.9, 3.4 * groups), layout="constrained")
    axes = figure.subplots(3 * groups, columns, squeeze=False)
    bare(axes)
    for index, (title, own) in enumerate(zip(titles, seen, strict=True)):
        group, column = divmod(index, columns)
        image_axis, map_axis, mark_axis = axes[3 * group : 3 * group + 3, column]
        pixels = _pixels(own)
        image_axis.imshow(pixels)
        image_axis.set_title(title, fontsize=8)
        extent = (0, pixels.shape[1], pixels.shape[0], 0)
        map_axis.imshow(
            own.map.detach().float().cpu().numpy(),
            cmap=HEAT,
            extent=extent,
            interpolation="bicubic",
        )
        mark_axis.imshow(_marked(own, 0.3))
    for group in range(groups):
        for row, label in enumerate(("image", "‖G‖", "top 30 %")):
            axes[3 * group + row, 0].set_ylabel(label, fontsize=8)
    return figure


def model_sheet(
    models: Mapping[str, Sequence[PictureMap]], titles: Sequence[str], *, fraction: float = 0.3
) -> Figure:
    """A row for each picture; of each model its map over the picture, and its top tokens.

    With one model before and after training this is Vision-TTT's Fig. 9 and 10. The first column
    shows what the first model saw. Each map has a colour scale of its own, whose ends are written
    below it: gradients of two models have no common unit.

    Args:
        models: the model's name → its maps, one for each picture, in one order.
        titles: of the pictures.
        fraction: share of the tokens that are marked, in (0, 1].

    Raises:
        ValueError: there is no model or picture, or a model has more or fewer maps than there are
            titles, or a picture is smaller than its map, or a token has no pixel with its patch,
            or the fraction is out of its range.
    """
    if not models or not titles or any(len(maps) != len(titles) for maps in models.values()):
        raise ValueError(
            f"each model needs a map for each of the pictures, got {len(titles)} titles and"
            f" {[len(maps) for maps in models.values()]} maps"
        )
    first = next(iter(models.values()))
    columns = 1 + 2 * len(models)
    cell = min(_WIDEST / columns, 1.6)
    heights = [drawn_proportion(each.picture.shape[-2:]) * cell + 0.28 for each in first]
    figure = Figure(figsize=(cell * columns + 0.3, sum(heights) + 0.75), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.05, wspace=0, hspace=0.01)
    axes = figure.subplots(len(titles), columns, squeeze=False, height_ratios=heights)
    for row, title in enumerate(titles):
        picture = _pixels(first[row])
        axes[row, 0].imshow(picture)
        axes[row, 0].set_ylabel(title, fontsize=8)
        for index, maps in enumerate(models.values()):
            over, top = axes[row, 1 + 2 * index : 3 + 2 * index]
            heat_over(over, maps[row])
            over.set_xlabel(_ends(maps[row].map), fontsize=7)
            top.imshow(_marked(maps[row], fraction))
    axes[0, 0].set_title("image", fontsize=8)
    for index, name in enumerate(models):
        over, top = axes[0, 1 + 2 * index : 3 + 2 * index]
        over.set_title(f"{name}\n‖G‖".strip(), fontsize=8)
        top.set_title(f"top {100 * fraction:g} %", fontsize=8)
    bare(axes)
    _add_scale(figure, axes)
    return figure


def layer_sheet(models: Mapping[str, PictureMap], *, title: str) -> Figure:
    """A picture's map in every layer: a row, or rows of twelve, for each model.

    Each map has a colour scale of its own, whose ends are written below it.

    Args:
        models: the model's name → the picture as it saw it, and maps [layers, h, w].
        title: of the picture.

    Raises:
        ValueError: a picture is smaller than its maps, or a token has no pixel with its patch.
    """
    most = max(len(each.map) for each in models.values())
    columns = 1 + min(most, _MOST_COLUMNS)
    rows = [(name, start) for name, each in models.items() for start in _starts(len(each.map))]
    cell = min((_WIDEST + 2.4) / columns, 1.5)
    shape = max(drawn_proportion(each.picture.shape[-2:]) for each in models.values())
    figure = Figure(
        figsize=(cell * columns + 0.3, (shape * cell + 0.42) * len(rows) + 0.6),
        layout="constrained",
    )
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02, wspace=0, hspace=0.01)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    bare(axes)
    for row, (name, start) in zip(axes, rows, strict=True):
        seen = models[name]
        maps = seen.map
        if start == 0:
            row[0].imshow(_pixels(seen._replace(map=maps[0])))
            row[0].set_ylabel(name, fontsize=8)
            row[0].set_title(title, fontsize=8)
        for axis, layer in zip(row[1:], range(start, len(maps)), strict=False):
            heat_over(axis, seen._replace(map=maps[layer]))
            axis.set_title(f"layer {1 + layer}", fontsize=7)
            axis.set_xlabel(_ends(maps[layer]), fontsize=6)
    _add_scale(figure, axes)
    return figure


def head_sheet(
    picture: Tensor,
    magnitude: Tensor,
    *,
    title: str,
    heads: Sequence[str],
    patch: tuple[int, int] | None = None,
) -> Figure:
    """A picture's map in every layer (rows) and head of every direction (columns) of one model.

    Each map has a colour scale of its own.

    Args:
        picture: [3, H, W] in [0, 1], not normalised.
        magnitude: [layers, heads, h, w], see :func:`vision_ttt.explain.gradient_magnitude`.
        title: of the picture and the model.
        heads: their names.
        patch: as in :class:`PictureMap`.

    Raises:
        ValueError: the picture is smaller than its maps, or a token has no pixel with this patch.
    """
    layers, count = magnitude.shape[:2]
    cell = max(min(_WIDEST / count, 1.1), 0.6)
    height = drawn_proportion(picture.shape[-2:]) * cell + 0.04
    figure = Figure(figsize=(cell * count + 0.5, height * layers + 0.9), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.01, h_pad=0.03, wspace=0, hspace=0)
    axes = figure.subplots(layers, count, squeeze=False)
    bare(axes)
    for layer, row in enumerate(axes):
        row[0].set_ylabel(f"layer {1 + layer}", fontsize=7)
        for axis, own in zip(row, magnitude[layer], strict=True):
            heat_over(axis, PictureMap(picture, own, patch))
    for axis, name in zip(axes[0], heads, strict=True):
        axis.set_title(name, fontsize=7)
    figure.suptitle(title, fontsize=9)
    _add_scale(figure, axes)
    return figure


def _seen(
    images: Tensor, maps: Tensor, titles: Sequence[str], patch: tuple[int, int] | None
) -> list[PictureMap]:
    if not len(images) == len(maps) == len(titles) > 0:
        raise ValueError(
            f"images, maps and titles must be equally many and at least one, got {len(images)}, "
            f"{len(maps)}, {len(titles)}"
        )
    return [PictureMap(image, own, patch) for image, own in zip(images, maps, strict=True)]


def heat_over(axis: Axes, seen: PictureMap) -> None:
    """Draw a map over its picture in grey, in colours from its smallest to its largest number."""
    pixels = _pixels(seen)
    extent = (0, pixels.shape[1], pixels.shape[0], 0)
    # Neither black nor white below the heat, which would be taken for its own dark and bright.
    axis.imshow(0.3 + 0.4 * pixels.mean(-1), cmap="gray", vmin=0, vmax=1, extent=extent)
    shown = seen.map.detach().float().cpu().numpy()
    axis.imshow(shown, cmap=HEAT, extent=extent, interpolation="bilinear", alpha=0.8)


def _pixels(seen: PictureMap) -> np.ndarray:
    """The picture [H', W', 3], padded to whole tokens as the model padded it."""
    whole = padded(seen.picture.detach().float().clamp(0, 1), seen.map.shape, _patch(seen))
    return whole.expand(3, -1, -1).permute(1, 2, 0).cpu().numpy()


def _patch(seen: PictureMap) -> Sequence[int]:
    picture, own, patch = seen
    if (
        picture.ndim != 3
        or len(picture) not in (1, 3)
        or own.ndim != 2
        or any(side < cells for side, cells in zip(picture.shape[1:], own.shape, strict=True))
    ):
        raise ValueError(
            "a picture [1 or 3, H, W] must be at least as large as its map [h, w]; got"
            f" {list(picture.shape)} and {list(own.shape)}"
        )
    return picture_patch(patch, picture.shape[1:], own.shape)


def _marked(seen: PictureMap, fraction: float) -> np.ndarray:
    """The picture, dark except for the top tokens."""
    pixels, patch = _pixels(seen), _patch(seen)
    marks = spread(top_fraction(seen.map[None], fraction).cpu(), pixels.shape[:2], patch)[0]
    return np.where(marks[..., None].numpy(), 0.25 + 0.75 * pixels, 0.25 * pixels)


def _starts(layers: int) -> range:
    return range(0, layers, _MOST_COLUMNS)


def _ends(own: Tensor) -> str:
    return f"{own.min().item():.3g} – {own.max().item():.3g}"


def _add_scale(figure: Figure, axes: np.ndarray) -> None:
    scale = figure.colorbar(
        ScalarMappable(mpl.colors.Normalize(0, 1), HEAT),
        ax=axes,
        location="bottom",
        shrink=0.5,
        aspect=40,
        pad=0.12 / figure.get_figheight(),
    )
    scale.set_ticks([0, 1], labels=["smallest", "largest"], fontsize=7)
    scale.set_label("‖G‖ of the map's tokens: inner loss per unit of the inner weights", fontsize=7)
