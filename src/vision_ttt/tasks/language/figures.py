"""Pictures of a language model's run, as matplotlib Figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter
from torch import Tensor


def loss_by_position(bands: Sequence[Mapping[str, Any]]) -> Figure:
    """Test loss against the token's position in its sequence.

    Args:
        bands: `first`, `last` and `loss` of each, as
            :meth:`vision_ttt.tasks.language.evaluation.LanguageEvaluation.by_band` has them.
    """
    figure = Figure(figsize=(4.8, 3.4), layout="constrained")
    axis = figure.subplots()
    axis.plot(middles(bands), [band["loss"] for band in bands], marker=".")
    axis.set(title="Loss by position", ylabel="nats per token")
    position_axis(axis)
    return figure


def middles(bands: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the geometric middle of each band of positions."""
    return [(band["first"] * band["last"]) ** 0.5 for band in bands]


def position_axis(axis: Axes) -> None:
    """Make the x axis one of positions: logarithmic, at powers of two."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("position of the token in its sequence")
    axis.grid(alpha=0.3)


def inner_loss_figure(losses: Mapping[str, tuple[Tensor, Tensor]], mini_batch_size: int) -> Figure:
    """Inner loss along the sequence, of the initial and of the learnt state, a panel per layer.

    Args:
        losses: layer's name → the losses at W₀ and at W_t, of each mini-batch.
        mini_batch_size: tokens of one.
    """
    columns = min(3, len(losses))
    rows = -(-len(losses) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for number, (axis, pair) in enumerate(zip(axes, losses.values(), strict=False)):
        for values, name in zip(pair, ("W₀", "W before the token's mini-batch"), strict=True):
            places = [mini_batch_size * (index + 0.5) for index in range(len(values))]
            axis.plot(places, values.tolist(), linewidth=1, label=name)
        axis.set_title(f"layer {number}", fontsize=9)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    for axis in axes[len(losses) :]:
        axis.set_axis_off()
    axes[0].legend(frameon=False, fontsize=8)
    figure.supxlabel("position of the token in its sequence")
    figure.supylabel("½‖f(k; W) − v‖²")
    return figure
