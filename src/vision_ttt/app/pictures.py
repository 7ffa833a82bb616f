"""An explanation's layers as pictures: maps over what the model saw, and losses as curves."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from operator import mul

from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from vision_ttt.explain import LossCourse
from vision_ttt.explain.inner_loss_figures import inner_loss_course_figure
from vision_ttt.explain.map_figures import HEAT

_WIDTH, _HEIGHT = 3.4, 4.0  # inches, that a picture fits into
_LEAST_SIDE = 480  # pixels of a shown picture
_DOTS = 200  # per inch

# Figures of several threads share matplotlib's caches of fonts and texts.
_DRAWING = threading.Lock()


def enlarged(picture: Image.Image) -> Image.Image:
    """Return a small picture with each pixel a square of pixels, a larger one as it is."""
    factor = _LEAST_SIDE // max(picture.size)
    if factor < 2:
        return picture
    size = (factor * picture.width, factor * picture.height)
    return picture.resize(size, Image.Resampling.NEAREST)


def heat_map(
    picture: Image.Image, values: Tensor, label: str, step: Sequence[int] | None = None
) -> Image.Image:
    """Return a map over a picture in grey, with a colour bar from its least to its largest value.

    Args:
        picture: RGB.
        values: [h, w] on the token grid.
        label: of the colour bar, with the unit.
        step: rows and columns of pixels from token to token, whose last one may reach beyond the
            picture. None for tokens that cover it evenly.
    """
    width, height = picture.size
    extent = (0, width, height, 0)
    rows, columns = (0, 0) if step is None else map(mul, step, values.shape)
    covered = (0, max(columns, width), max(rows, height), 0)
    scale = min(_WIDTH / width, _HEIGHT / height)
    size = (max(scale * width, _WIDTH / 2), scale * height + 0.7)  # the bar needs room
    figure = Figure(figsize=size, layout="constrained")
    axis = figure.subplots()
    axis.imshow(picture.convert("L"), cmap="gray", vmin=0, vmax=255, extent=extent)
    heat = axis.imshow(
        values.numpy(), cmap=HEAT, extent=covered, interpolation="bilinear", alpha=0.75
    )
    axis.set(xlim=(0, width), ylim=(height, 0))
    axis.axis("off")
    bar = figure.colorbar(heat, ax=axis, location="bottom", pad=0.02, aspect=40, label=label)
    bar.solids.set_alpha(1)
    return _drawn(figure)


def loss_curves(losses: LossCourse, title: str) -> Image.Image:
    """Return a layer's three inner losses along its scan as curves."""
    return _drawn(inner_loss_course_figure({title: losses}))


def _drawn(figure: Figure) -> Image.Image:
    content = io.BytesIO()
    with _DRAWING:
        figure.savefig(content, format="png", dpi=_DOTS)
    return Image.open(content).convert("RGB")
