"""How far a gradient has to go along the sequence, and what is left of it (Mamba-Reg, Appendix B).

The appendix counts multiplications: the gradient of one token's output with respect to another is a
product of as many Jacobians as the scan makes steps between the two. Registers spread over the
sequence, all of which the head reads, shorten that path. Here both are measured of a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from vision_ttt.explain.feature_maps import check_images
from vision_ttt.explain.inner_loop import refuse_without_gradients
from vision_ttt.explain.palette import line_style
from vision_ttt.models.evaluation_mode import evaluation_mode
from vision_ttt.models.plain_backbone import PlainBackbone

_AT_ONCE = 8
"""Images whose graph is held at a time."""


class ScanPaths(NamedTuple):
    """Gradient norms of a model by distance along its sequence of N tokens."""

    block: Tensor
    """[N]: at index d, of a token's output of one block with respect to the input at the token d
    places away, over both directions, all blocks and images; NaN where no such pair was drawn."""
    feature: Tensor
    """[N]: at index d, of the classification feature with respect to the embedded image tokens
    whose nearest token that the feature reads is d places away, over the root mean square of all
    image tokens; NaN where there is no such token."""
    lengths: Tensor
    """[B, T]: distance of each image token to the nearest token that the feature reads."""


def scan_paths(model: PlainBackbone, images: Tensor, *, draws: int = 4, seed: int = 0) -> ScanPaths:
    """Gradient norms against the distance along the sequence, and each token's shortest path.

    A norm is the root mean square of ‖Jᵀ u‖ over images, pairs of tokens and draws, with J the
    Jacobian of D outputs and u a random vector of length 1. The expectation of the square is
    ‖J‖²_F / D; a residual connection alone has norm 1. A distance is the number of steps along the
    sequence, which has the image's tokens row by row.

    Args:
        model: a plain backbone of this package. It is not modified.
        images: [B, C, H, W], normalised as for the model.
        draws: vectors u for each image, with a random output token in each block.
        seed: of the draws.

    Raises:
        TypeError: the model is not a plain backbone, or has no gradients, as one of
            ``for_inference``.
        ValueError: draws is below 1, the images do not fit the model, or gradients are not finite
            or all zero.
        RuntimeError: called within ``torch.inference_mode``.
    """
    if not isinstance(model, PlainBackbone):
        raise TypeError(f"a plain backbone of vision_ttt is needed, got {type(model).__name__}")
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    refuse_without_gradients(model)
    check_images(images)
    generator = torch.Generator().manual_seed(seed)
    block, feature, lengths = _Means(), _Means(), []
    with evaluation_mode(model), torch.enable_grad():
        for part in images.split(_AT_ONCE):
            with torch.no_grad():
                tokens, context = model.embed(part)
            for distances, squares in _through_blocks(model, tokens, context, draws, generator):
                block.add(distances, squares)
            distances, squares = _to_feature(model, tokens, context, draws, generator)
            feature.add(distances, squares)
            lengths.append(distances)
    if not (block.sums.isfinite().all() and feature.sums.isfinite().all()):
        raise ValueError("the gradients are not finite: the model's weights may be damaged")
    size = tokens.shape[1]
    whole = (feature.sums.sum() / feature.counts.sum()).sqrt()
    return ScanPaths(block.roots(size), feature.roots(size) / whole, torch.cat(lengths))


class _Means:
    """Mean squares by distance."""

    def __init__(self) -> None:
        self.sums = self.counts = torch.zeros(0, dtype=torch.float64)

    def add(self, distances: Tensor, squares: Tensor) -> None:
        size = max(len(self.sums), int(distances.max()) + 1)
        flat, grown = distances.flatten(), (0, size - len(self.sums))
        sums = torch.bincount(flat, squares.flatten().double(), minlength=size)
        self.sums = F.pad(self.sums, grown) + sums
        self.counts = F.pad(self.counts, grown) + torch.bincount(flat, minlength=size)

    def roots(self, size: int) -> Tensor:
        """[size], float32, NaN where nothing was added."""
        roots = torch.full((size,), torch.nan)
        roots[: len(self.sums)] = (self.sums / self.counts).sqrt().float()
        return roots


def _unit_vectors(like: Tensor, generator: torch.Generator) -> Tensor:
    vectors = torch.randn(like.shape, generator=generator).to(like.device)
    return vectors / vectors.norm(dim=-1, keepdim=True)


def _through_blocks(
    model: PlainBackbone,
    x: Tensor,
    context: tuple[Any, ...],
    draws: int,
    generator: torch.Generator,
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each block and draw: distances and squared gradient norms [B, N] of all input tokens."""
    images, places = torch.arange(len(x)), torch.arange(x.shape[1])
    for index in range(len(model.blocks)):
        x = x.detach().requires_grad_()
        y = model.run_blocks(x, context, index, index + 1)
        for _ in range(draws):
            chosen = torch.randint(len(places), (len(x),), generator=generator)
            outputs = y[images.to(y.device), chosen.to(y.device)].float()
            response = (outputs * _unit_vectors(outputs, generator)).sum()
            (gradient,) = torch.autograd.grad(response, x, retain_graph=True)
            squares = gradient.float().square().sum(-1).cpu()
            yield (places - chosen[:, None]).abs(), squares
        x = y


def _to_feature(
    model: PlainBackbone,
    x: Tensor,
    context: tuple[Any, ...],
    draws: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Each image token's distance to a token that is read, and mean squared gradient: [B, T]."""
    x = x.detach().requires_grad_()
    y = model.run_blocks(x, context)
    feature = model.pool(model.norm(y)).flatten(1).float()
    squares, read = torch.zeros(x.shape[:2]), torch.zeros(x.shape[:2], dtype=torch.bool)
    for _ in range(draws):
        response = (feature * _unit_vectors(feature, generator)).sum()
        ofs = torch.autograd.grad(response, (x, y), retain_graph=True)
        inputs, outputs = (each.float().square().sum(-1).cpu() for each in ofs)
        squares = squares + inputs / draws
        read |= outputs != 0  # as NaN is: damaged weights are told of later
    if not read.any(1).all():
        raise ValueError("the classification feature has no gradient: it depends on no token")
    distances = torch.stack([_to_nearest(own) for own in read])
    return tuple(model.split_tokens(each[..., None])[0][..., 0] for each in (distances, squares))


def _to_nearest(read: Tensor) -> Tensor:
    """Distance of each place [N] to the nearest that is true."""
    places = torch.arange(len(read))
    return (places[:, None] - places[read]).abs().amin(1)


def scan_path_figure(found: Mapping[str, ScanPaths]) -> Figure:
    """Both norms against distance, a line for each model.

    Args:
        found: a model's name → what :func:`scan_paths` returned.
    """
    figure = Figure(figsize=(9.2, 3.8), layout="constrained")
    block, feature = figure.subplots(1, 2)
    for index, (name, paths) in enumerate(found.items()):
        style = line_style(index) | {"label": name, "linewidth": 1.4}
        distances = torch.arange(len(paths.block))
        block.plot(distances[1:], paths.block[1:], **style)
        seen = ~paths.feature.isnan()
        feature.plot(distances[seen], paths.feature[seen], marker=".", **style)
    block.set(xscale="log", yscale="log", title="a token's output of one block", ylabel="norm")
    block.set_xlabel("tokens between output and input")
    feature.set(
        yscale="log", title="the classification feature", ylabel="norm over that of all tokens"
    )
    feature.set_xlabel("tokens to the nearest that the feature reads")
    for axis in (block, feature):
        axis.grid(alpha=0.3)
    figure.suptitle("Gradient norms along the sequence (Mamba-Reg, Appendix B)", fontsize=10)
    handles, names = block.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure
