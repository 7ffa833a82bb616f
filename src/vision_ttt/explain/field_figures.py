"""Figures of effective receptive fields, as matplotlib Figures that need no display."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from torch import Tensor

from vision_ttt.explain.palette import SEQUENTIAL, bare, line_style
from vision_ttt.explain.receptive_field import anisotropy, energy_within, radial_profile

_LOWEST = 1e-3
_PER_ROW = 4


def receptive_field_sheet(fields: Mapping[str, Tensor], *, radius: float | None = None) -> Figure:
    """Fields of several models beside each other, with the numbers below each (Vision-TTT, Fig. 8).

    One logarithmic colour scale serves all of them: the response over the field's own largest, as
    the size of the features differs between models. Below a thousandth the colour remains that of
    a thousandth; pixels without any response are grey. A circle shows the radius.

    Args:
        fields: the model's name → [H, W] of :func:`vision_ttt.explain.receptive_field`.
        radius: in pixels, for the share of energy within it; by default a quarter of each field's
            shorter side.

    Raises:
        ValueError: there are no fields, one is none, or the radius is negative.
    """
    if not fields:
        raise ValueError("there must be fields to draw, got none")
    columns = min(_PER_ROW, len(fields))
    rows = -(-len(fields) // columns)
    figure = Figure(figsize=(2.4 * columns + 1.0, 2.95 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    colours = matplotlib.colormaps[SEQUENTIAL].with_extremes(bad="0.75")
    scale = LogNorm(_LOWEST, 1)
    bare(axes)
    any_empty = False
    for axis, (name, field) in zip(axes.flat, fields.items(), strict=False):
        own = min(field.shape) / 4 if radius is None else radius
        share = energy_within(field, own)
        shown = (field / field.max()).detach().float().cpu().numpy()
        height, width = shown.shape
        empty = shown == 0
        any_empty |= bool(empty.any())
        visible = np.ma.masked_array(np.maximum(shown, _LOWEST), empty)
        picture = axis.imshow(visible, cmap=colours, norm=scale, interpolation="nearest")
        middle = ((width - 1) / 2, (height - 1) / 2)
        axis.add_patch(Circle(middle, own, fill=False, color="white", ls="--", lw=0.8))
        axis.set_title(name, fontsize=9)
        text = f"{100 * share:.0f} % within {own:.3g} px\nanisotropy {anisotropy(field):.2f}"
        axis.set_xlabel(text, fontsize=8)
    label = "response / largest" + (" (grey: none)" if any_empty else "")
    figure.colorbar(picture, ax=axes, shrink=0.8, label=label)
    return figure


def radial_profiles(fields: Mapping[str, Tensor]) -> Figure:
    """Mean response against the distance from the middle, a line for each model.

    Distances are in half the shorter side of the image, so that fields of several sizes compare;
    responses are over the mean of the field, so that an even field is a line at 1.

    Args:
        fields: the model's name → [H, W] of :func:`vision_ttt.explain.receptive_field`.

    Raises:
        ValueError: a field is none.
    """
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axis = figure.subplots()
    for index, (name, field) in enumerate(fields.items()):
        profile = (radial_profile(field) / field.mean().item()).numpy()
        distance = (np.arange(len(profile)) + 0.5) / (min(field.shape) / 2)
        visible = np.where(profile > 0, profile, np.nan)
        axis.plot(distance, visible, label=name, **line_style(index))
    axis.axhline(1, color="0.6", lw=0.8)
    axis.set_yscale("log")
    axis.set(xlabel="distance / half the side", ylabel="response / mean response")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure
