"""Figures of a backbone's artefacts as Mamba-Reg shows them: absolute norms, distances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from vision_ttt.explain.palette import SEQUENTIAL, bare, line_style
from vision_ttt.explain.token_norms import OUTLIER
from vision_ttt.explain.token_pixels import drawn_proportion


def norm_histograms(norms: Mapping[str, Tensor]) -> Figure:
    """Norms of models as they are: all of the last layer, and by layer (Mamba-Reg, Figs. 3 and 4).

    From left to right: the distribution of the last layer's norms, as the share of tokens in each
    of 60 logarithmic bins; and of every layer the mean of the outliers (Fig. 3, where a layer has
    some), the mean of all tokens, and the largest.

    Args:
        norms: the model's name → [B, layers, h, w] of :func:`vision_ttt.explain.token_norms`.

    Raises:
        ValueError: there are no norms.
    """
    if not norms:
        raise ValueError("there must be norms of at least one model, got none")
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    shares, means = figure.subplots(1, 2)
    exact = {name: own.detach().float().cpu() for name, own in norms.items()}
    ends = [end for own in exact.values() for end in (own[:, -1].min(), own[:, -1].max())]
    bins = np.geomspace(max(min(ends).item(), 1e-6), max(ends).item() * 1.001, 61)
    for index, (name, own) in enumerate(exact.items()):
        style = {"marker": ".", **line_style(index)}  # a line of one layer is invisible
        counts, _ = np.histogram(own[:, -1].flatten().numpy(), bins)
        shares.stairs(100 * counts / own[:, -1].numel(), bins, label=name, color=style["color"])
        outliers = own > OUTLIER * own.flatten(2).median(-1).values[..., None, None]
        sums, count = (own * outliers).sum((0, 2, 3)), outliers.sum((0, 2, 3))
        places = np.arange(1, own.shape[1] + 1)
        outlying = (sums / count).numpy()  # not a number where a layer has none
        means.plot(places, outlying, label=f"{name}, outliers", **style)
        means.plot(places, own.mean((0, 2, 3)).numpy(), lw=0.8, label=f"{name}, all", **style)
        means.plot(places, own.amax((0, 2, 3)).numpy(), lw=0.4, **style)
    shares.set(xscale="log", xlabel="norm", ylabel="% of the tokens", title="Last layer")
    means.set(
        yscale="log", xlabel="layer", ylabel="norm", title="Mean of outliers, of all; largest"
    )
    means.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in (shares, means):
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    return figure


def distance_sheet(
    images: Tensor, distances: Tensor, titles: Sequence[str] | None = None
) -> Figure:
    """Distances to each global token as maps beside their image (Mamba-Reg, Figs. 1 and 6).

    Dark is near; each map has a scale of its own.

    Args:
        images: [B, 3, H, W] or [B, 1, H, W] in [0, 1], not normalised.
        distances: [B, n, h, w] of :func:`vision_ttt.explain.token_distances`.
        titles: one per image, or None.

    Raises:
        ValueError: the numbers of images, distances and titles differ or are 0.
    """
    titles = [""] * len(images) if titles is None else titles
    if not len(images) == len(distances) == len(titles) or not titles:
        raise ValueError(
            "images, distances and titles must be equally many and at least one, got "
            f"{len(images)}, {len(distances)} and {len(titles)}"
        )
    pictures = images.detach().float().clamp(0, 1).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).cpu()
    maps = distances.detach().float().cpu().numpy()
    rows, columns = len(titles), 1 + maps.shape[1]
    size = (1.3 * columns + 0.3, 1.3 * drawn_proportion(images.shape[2:]) * rows + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    bare(axes)
    for row, title in enumerate(titles):
        axes[row, 0].imshow(pictures[row].numpy())
        axes[row, 0].set_ylabel(title, fontsize=8)
        for axis, own in zip(axes[row, 1:], maps[row], strict=True):
            axis.imshow(own, cmap=SEQUENTIAL, interpolation="nearest")
    names = ["distance"] if columns == 2 else range(1, columns)
    for axis, name in zip(axes[0], ["image", *names], strict=True):
        axis.set_title(str(name), fontsize=9)
    return figure
