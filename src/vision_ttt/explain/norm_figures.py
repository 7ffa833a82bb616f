"""Figures of token norms, as matplotlib Figures that need no display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from vision_ttt.explain.palette import MARK, SEQUENTIAL, bare, line_style
from vision_ttt.explain.token_norms import OUTLIER, outlier_share
from vision_ttt.explain.token_pixels import drawn_proportion

_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Of norms over their median; matplotlib's own labels of half a decade run into each other."""


def norm_map_sheet(
    images: Tensor,
    norms: Tensor,
    titles: Sequence[str] | None = None,
    *,
    absolute: bool = False,
) -> Figure:
    """Norms layer by layer as maps beside their image (Mamba-Reg, Fig. 2).

    Each map is over its own median, so that the growth of the residual stream from layer to layer
    does not hide its outliers; one logarithmic colour scale serves all maps. Tokens that
    :func:`vision_ttt.explain.outlier_share` counts are framed.

    Args:
        images: [B, 3, H, W] or [B, 1, H, W] in [0, 1], not normalised.
        norms: [B, layers, h, w] of :func:`vision_ttt.explain.token_norms`.
        titles: one per image, or None.
        absolute: show the norms themselves, as the paper does.

    Raises:
        ValueError: the numbers of images, norms and titles differ or are 0, or an image has other
            channels.
    """
    titles = [""] * len(images) if titles is None else titles
    if not len(images) == len(norms) == len(titles) or not titles:
        raise ValueError(
            "images, norms and titles must be equally many and at least one, got "
            f"{len(images)}, {len(norms)} and {len(titles)}"
        )
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images must be [B, 1 or 3, H, W], got {list(images.shape)}")
    count = norms.shape[1]
    # All of few layers, or six from the first to the last.
    shown = sorted({round(place) for place in np.linspace(0, count - 1, min(count, 6))})
    relative = over_median(norms)[:, shown].numpy()
    drawn_norms = norms.detach().float().cpu()[:, shown].numpy() if absolute else relative
    pictures = images.detach().float().clamp(0, 1).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).cpu()

    rows, columns = len(titles), 1 + len(shown)
    ratio = drawn_proportion(images.shape[2:])
    size = (1.5 * columns + 0.9, 1.5 * ratio * rows + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    bare(axes)
    largest = max(float(relative.max()), 2 * OUTLIER)
    # Symmetric around the median's 1 below, as far as the largest outlier above.
    least = max(float(drawn_norms.min()), float(drawn_norms.max()) * 1e-6)
    scale = LogNorm(least, drawn_norms.max()) if absolute else LogNorm(1 / OUTLIER, largest)
    for row, title in enumerate(titles):
        axes[row, 0].imshow(pictures[row].numpy())
        axes[row, 0].set_ylabel(title, fontsize=8)
        for axis, norm, own in zip(axes[row, 1:], drawn_norms[row], relative[row], strict=True):
            visible = np.maximum(norm, scale.vmin)
            drawn = axis.imshow(visible, cmap=SEQUENTIAL, norm=scale, interpolation="nearest")
            _frame(axis, own > OUTLIER)
    names = ["image", *(f"layer {layer + 1}" for layer in shown)]
    for axis, name in zip(axes[0], names, strict=True):
        axis.set_title(name, fontsize=9)
    if absolute:
        figure.colorbar(drawn, ax=axes, shrink=0.8, label="norm")
        return figure
    bar = figure.colorbar(drawn, ax=axes, shrink=0.8, label="norm / median of the map")
    ticks = [tick for tick in _TICKS if 1 / OUTLIER <= tick <= largest]
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.ax.minorticks_off()
    return figure


def norm_distributions(norms: Mapping[str, Tensor]) -> Figure:
    """Norms of models compared: their distribution, tails and outliers (Mamba-Reg, Figs. 3 and 4).

    From left to right: the distribution of the last layer's norms over their image's median, as
    the share of tokens above each norm; the 95th percentile and the largest of every layer, over
    all images; and the share of outliers.

    Args:
        norms: the model's name → [B, layers, h, w] of :func:`vision_ttt.explain.token_norms`.

    Raises:
        ValueError: there are no norms, or they are not as above.
    """
    if not norms:
        raise ValueError("there must be norms of at least one model, got none")
    found = [
        (name, over_median(own), outlier_share(own.detach().float().cpu()).mean(0))
        for name, own in norms.items()
    ]
    figure = Figure(figsize=(12.6, 3.6), layout="constrained")
    above, tails, outliers = figure.subplots(1, 3)
    for index, (name, relative, shares) in enumerate(found):
        style = line_style(index)
        last = np.sort(relative[:, -1].flatten().numpy())
        remaining = 100 * np.arange(len(last), 0, -1) / len(last)
        above.step(last, remaining, where="pre", label=name, **style)
        by_layer = relative.transpose(0, 1).flatten(1).numpy()  # [layers, B · h · w]
        places = np.arange(1, len(by_layer) + 1)
        tails.plot(places, np.quantile(by_layer, 0.95, axis=1), marker=".", lw=2, **style)
        tails.plot(places, by_layer.max(1), marker=".", lw=0.8, **style)
        outliers.plot(places, 100 * shares.numpy(), marker=".", label=name, **style)
    above.axvline(OUTLIER, color="0.6", lw=0.8)
    above.set(xscale="log", yscale="log", xlabel="norm / median of the image")
    above.set(ylabel="tokens of at least this norm, %", title="Distribution, last layer")
    _label(above.xaxis)
    tails.axhline(OUTLIER, color="0.6", lw=0.8)
    tails.set(yscale="log", ylabel="norm / median of the image")
    tails.set(title="95th percentile (thick) and largest")
    _label(tails.yaxis)
    largest = max(shares.max().item() for _, _, shares in found)
    outliers.set_ylim(0, max(1, 105 * largest))
    outliers.set(ylabel="% of the tokens", title=f"Outliers: above {OUTLIER:g} medians")
    for axis in (tails, outliers):
        axis.set_xlabel("layer")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in (above, tails, outliers):
        axis.grid(alpha=0.3)
    outliers.legend(frameon=False, fontsize=8)
    return figure


def over_median(norms: Tensor) -> Tensor:
    """Norms over the median of their image and layer [B, layers, h, w], float32 on the CPU.

    Raises:
        ValueError: they are not such norms, or a median is 0.
    """
    if norms.ndim != 4 or not norms.numel():
        raise ValueError(f"norms must be [B, layers, h, w], got {list(norms.shape)}")
    exact = norms.detach().float().cpu()
    median = exact.flatten(2).median(-1).values[..., None, None]
    if not exact.isfinite().all() or not (median > 0).all():
        raise ValueError("norms must be finite, with a median above 0 in every image and layer")
    return exact / median


def _label(axis: Axis) -> None:
    """Give a logarithmic axis of norms over their median plain labels."""
    low, high = axis.get_view_interval()
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    axis.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)
    axis.set_view_interval(low, high, ignore=True)


def _frame(axis: Axes, marked: np.ndarray) -> None:
    """Draw a line around each marked token, all as one with gaps: many lines take minutes."""
    rows, columns = np.nonzero(marked)
    if len(rows):
        xs = columns[:, None] + (-0.5, 0.5, 0.5, -0.5, -0.5, np.nan)
        ys = rows[:, None] + (-0.5, -0.5, 0.5, 0.5, -0.5, np.nan)
        axis.plot(xs.ravel(), ys.ravel(), color=MARK, lw=0.8)
