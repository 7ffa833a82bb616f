"""Colours and dashes of the figures, which differ for colour-blind readers and in grey print."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

SEQUENTIAL = "cividis"
"""The colour map of numbers from small to large."""

MARK = "#D55E00"
"""The colour of what stands out on that map."""

# Okabe and Ito's colours without yellow, which is too light for a line on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":", "-.")


def line_style(index: int) -> dict[str, str]:
    """Keywords of ``Axes.plot`` for the line of this number: 28 differ."""
    dashes, colour = divmod(index, len(_COLOURS))
    return {"color": _COLOURS[colour], "linestyle": _DASHES[dashes % len(_DASHES)]}


def bare(axes: np.ndarray) -> None:
    """Remove the ticks and frames of an array of axes."""
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[], frame_on=False)
