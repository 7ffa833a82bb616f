"""A large picture, its true labels, and what models make of it as a whole and by tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.letters.dataset import BACKGROUND_NAME
from studies.letters.images import LetterSettings, render_letters
from studies.sweeps.label_pictures import unpacked
from studies.sweeps.results import Result
from studies.sweeps.tables import by_row
from studies.sweeps.tile_ways import OVERLAPPING, SHRUNK, TILES, TIMES, WHOLE
from vision_ttt.errors import UserError
from vision_ttt.tasks.segmentation.pictures import class_colours

if TYPE_CHECKING:
    from studies.sweeps.definition import Sweep

_SHOWN = {
    "Vittt, whole": ("vittt-whole-mark", WHOLE),
    "Vittt by tiles": ("vittt-tiles-mark", TILES),
    "Vittt by tiles, half overlapping": ("vittt-tiles-mark", OVERLAPPING),
    "DeiT with Conv2d by tiles": ("deit-tiles-mark", TILES),
}
"""Title → row and way."""


def tile_figure(sweep: Sweep, results: Sequence[Result]) -> Figure:
    """Return a picture and its labels, true ones and those of each way, of the first seed.

    Raises:
        UserError: there are no results, one is not of this sweep, or a row that is shown has none.
    """
    found = by_row(sweep, results)
    if missing := {row for row, _ in _SHOWN.values()} - found.keys():
        raise UserError(f"the picture needs results of {', '.join(sorted(missing))}")
    settings = LetterSettings(**_options(sweep))
    settings = LetterSettings(**{**_options(sweep), "side": TIMES * settings.side})
    measured = {title: found[row][0].measured for title, (row, _) in _SHOWN.items()}
    picture = render_letters(settings, "test", measured["Vittt, whole"]["picture"])
    colours = np.array(class_colours((BACKGROUND_NAME, *settings.names)), dtype=np.uint8)
    figure = Figure(figsize=(10.8, 7.6), layout="constrained")
    axes = figure.subplots(2, 3).ravel()
    axes[0].imshow(picture.image.reduce(SHRUNK // 2))
    axes[0].set_title(f"{settings.side}² pixels; the mark's kind of ink counts", fontsize=9)
    axes[1].imshow(colours[picture.labels()[::SHRUNK, ::SHRUNK]])
    axes[1].set_title("true labels", fontsize=9)
    for axis, (title, (_, way)) in zip(axes[2:], _SHOWN.items(), strict=True):
        own = measured[title]["ways"][way]
        axis.imshow(colours[unpacked(own["labels"])])
        axis.set_title(f"{title}: {own['right']:.0%} of letters right", fontsize=9)
        if way != WHOLE:
            _draw_tiles(axis, settings.side // 4 // SHRUNK)
    for axis in axes:
        axis.set_xticks([])
        axis.set_yticks([])
    return figure


def _options(sweep: Sweep) -> dict[str, int]:
    options = dict(sweep.by_name["vittt-whole-mark"].changes["data.root_options"])
    del options["test_images"]
    return options


def _draw_tiles(axis: Axes, side: int) -> None:
    for place in range(1, 4):
        for draw in (axis.axhline, axis.axvline):
            draw(place * side - 0.5, color="white", linewidth=0.6)
