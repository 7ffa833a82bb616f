"""Deletion and insertion curves: how well a map of an image's tokens tells what the model uses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.transforms.functional import gaussian_blur

from vision_ttt.explain.token_pixels import check_patch, spread
from vision_ttt.models.evaluation_mode import evaluation_mode


def deletion_curve(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    maps: Tensor,
    shares: Sequence[float],
    *,
    fill: Tensor,
    patch: tuple[int, int] | None = None,
    batch_size: int = 64,
    seed: int = 0,
) -> Tensor:
    """Probability of the true class after the tokens of the highest scores are removed.

    This is the deletion of Petsiuk et al. (RISE, BMVC 2018), token by token: at share s the pixels
    of the round(s · h · w) tokens of highest score are replaced by those of ``fill``. If the map
    marks what the model uses, the probability falls early, and the area under the curve is small.

    Images with replaced pixels are others than those of training. A curve is therefore to be
    compared with those of other orders and the same fill, a random order above all.

    Args:
        model: a classifier, images [B, C, H, W] → logits [B, classes]. It runs in evaluation mode
            and stays as it is.
        images: [B, C, H, W], normalised as for the model.
        labels: the true classes [B], int64.
        maps: scores [B, h, w] of the tokens, e.g. of
            :func:`vision_ttt.explain.mean_map`. Tokens of equal score follow each other in a random
            order, so that a constant map is the random order.
        shares: of the tokens to remove, rising, at least two, from 0 to 1.
        fill: what removed pixels are replaced by, of a shape that expands to the images', see
            :func:`mean_colour`, :func:`blurred` and :func:`black`.
        patch: rows and columns of pixels from token to token, the second result of
            :func:`vision_ttt.explain.feature_maps.token_grid`: needed for images that the model
            pads and for sides that are not whole tokens. The last token of a side has all pixels
            that are left. By default (H / h, W / w), which must be whole.
        batch_size: images in a forward pass, which bounds the memory.
        seed: of the order of equal scores. It differs from image to image and depends neither on
            their number nor on the device.

    Returns:
        Probabilities [B, shares], float32 on the images' device.

    Raises:
        ValueError: an argument's shape or range is not as above, a score is not finite, or a label
            is no class of the model.
        TypeError: the labels are not int64.
    """
    return _curve(model, images, labels, maps, shares, fill, patch, batch_size, seed, inserts=False)


def insertion_curve(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    maps: Tensor,
    shares: Sequence[float],
    *,
    fill: Tensor,
    patch: tuple[int, int] | None = None,
    batch_size: int = 64,
    seed: int = 0,
) -> Tensor:
    """Probability of the true class after the tokens of the highest scores are revealed.

    The counterpart of :func:`deletion_curve`, with its arguments, result and errors: all pixels
    begin as those of ``fill``, and at share s the round(s · h · w) tokens of highest score have
    their own. If the map marks what the model uses, the probability rises early, and the area under
    the curve is large.
    """
    return _curve(model, images, labels, maps, shares, fill, patch, batch_size, seed, inserts=True)


def area_under(curve: Tensor, shares: Sequence[float]) -> Tensor:
    """The mean height of curves by the trapezoidal rule: [..., shares] → [...], in float32.

    Where the shares go from 0 to 1 this is the area under the curve.

    Raises:
        ValueError: the shares are not rising numbers from 0 to 1, or are not as many as the points
            of the curve.
    """
    _check_shares(shares)
    if curve.ndim == 0 or curve.shape[-1] != len(shares):
        raise ValueError(
            f"the curve must be [..., {len(shares)}] for {len(shares)} shares, got "
            f"{list(curve.shape)}"
        )
    places = torch.tensor(shares, dtype=torch.float32, device=curve.device)
    return torch.trapezoid(curve.float(), places) / (places[-1] - places[0])


def whole_token_shares(tokens: int, points: int = 11) -> list[float]:
    """Evenly spaced shares from 0 to 1, each rounded to a whole number of tokens.

    Args:
        tokens: of the map, h · w.
        points: of the curve, at least 2; fewer are returned where there are not as many tokens.

    Raises:
        ValueError: there is no token, or fewer than 2 points.
    """
    if tokens < 1 or points < 2:
        raise ValueError(f"tokens must be at least 1 and points 2, got {tokens} and {points}")
    counts = {round(place * tokens / (points - 1)) for place in range(points)}
    return [count / tokens for count in sorted(counts)]


def mean_colour(images: Tensor) -> Tensor:
    """The mean colour of each image, as a fill: [B, C, H, W] → [B, C, 1, 1]."""
    return images.float().mean((2, 3), keepdim=True).to(images.dtype)


def blurred(images: Tensor, sigma: float) -> Tensor:
    """The images after a Gaussian blur, as a fill: [B, C, H, W] → the same.

    Args:
        images: mirrored at their rims.
        sigma: standard deviation in pixels, above 0; at least the side of a token, so that little
            of a token's own content is left in its place.

    Raises:
        ValueError: sigma is not above 0.
    """
    if not 0 < sigma < math.inf:
        raise ValueError(f"sigma must be above 0 and finite, got {sigma}")
    # A mirror image is no larger than the image without its rim.
    radii = [min(math.ceil(3 * sigma), side - 1) for side in images.shape[-2:]]
    kernel = [2 * radius + 1 for radius in reversed(radii)]  # width, height
    return gaussian_blur(images.float(), kernel, [sigma, sigma]).to(images.dtype)


def black(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Black as normalised images have it, as a fill: [1, C, 1, 1] of the images' dtype.

    Args:
        images: [B, C, H, W].
        mean, std: C numbers each, by which the images were normalised.

    Raises:
        ValueError: they are not C numbers each.
    """
    channels = images.shape[1]
    if not len(mean) == len(std) == channels:
        raise ValueError(
            f"mean and std must have {channels} numbers each, got {len(mean)} and {len(std)}"
        )
    levels = [-centre / spread for centre, spread in zip(mean, std, strict=True)]
    return torch.tensor(levels, dtype=images.dtype, device=images.device).view(1, channels, 1, 1)


@torch.no_grad()
def _curve(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    maps: Tensor,
    shares: Sequence[float],
    fill: Tensor,
    patch: tuple[int, int] | None,
    batch_size: int,
    seed: int,
    *,
    inserts: bool,
) -> Tensor:
    _check_shares(shares)
    _check_images(images, labels, maps, fill, batch_size)
    grid = maps.shape[1:]
    patch = _patch(images, maps, patch)
    fill = fill.to(images).expand_as(images)
    ranks = _ranks(maps, seed).to(images.device)
    counts = torch.tensor(
        [round(share * ranks.shape[1]) for share in shares], dtype=torch.int64, device=images.device
    )
    curves = []
    pairs = torch.arange(len(images) * len(shares), dtype=torch.int64, device=images.device)
    with evaluation_mode(model):
        for pair in pairs.split(batch_size):
            image, step = pair // len(shares), pair % len(shares)
            marked = (ranks[image] < counts[step, None]).unflatten(1, grid)
            marked = spread(marked, images.shape[2:], patch)
            # Insertion shows the marked tokens, deletion the others.
            shown = torch.where((marked == inserts)[:, None], images[image], fill[image])
            curves.append(_true_class(model(shown), labels[image]))
    return torch.cat(curves).view(len(images), len(shares))


def _patch(images: Tensor, maps: Tensor, patch: tuple[int, int] | None) -> tuple[int, int]:
    """Rows and columns of pixels from token to token, as given or from even division."""
    (height, width), (rows, columns) = images.shape[2:], maps.shape[1:]
    if patch is not None:
        check_patch(patch, (height, width), (rows, columns))
        return patch
    if height % rows or width % columns:
        raise ValueError(
            "every token must cover a whole number of pixels where no patch is given: images are "
            f"{[height, width]}, maps {[rows, columns]}"
        )
    return height // rows, width // columns


def _ranks(maps: Tensor, seed: int) -> Tensor:
    """The place [B, h · w] of each token in its image's order, 0 for the highest score."""
    scores = maps.detach().float().flatten(1)
    # Equal scores keep their places in a stable sort; these are made random before. The generator
    # is the CPU's on every device, for the same order.
    generator = torch.Generator(device="cpu").manual_seed(seed)
    numbers = torch.rand(scores.shape, generator=generator, dtype=torch.float32, device="cpu")
    shuffled = numbers.argsort(1).to(scores.device)
    order = scores.gather(1, shuffled).argsort(dim=1, descending=True, stable=True)
    return shuffled.gather(1, order).argsort(1)


def _true_class(logits: Tensor, labels: Tensor) -> Tensor:
    """Softmax probability [B] of the labels [B] by logits [B, classes], in float32."""
    if logits.ndim != 2 or labels.max() >= logits.shape[1]:
        raise ValueError(
            f"the model must return logits [B, classes] with classes above the largest label, "
            f"{int(labels.max())}; got {list(logits.shape)}"
        )
    return logits.float().softmax(1).gather(1, labels[:, None]).squeeze(1)


def _check_shares(shares: Sequence[float]) -> None:
    rising = all(low < high for low, high in itertools.pairwise(shares))
    if len(shares) < 2 or not rising or not (shares[0] >= 0 and shares[-1] <= 1):
        raise ValueError(
            f"shares must be at least two rising numbers from 0 to 1, got {list(shares)}"
        )


def _check_images(
    images: Tensor, labels: Tensor, maps: Tensor, fill: Tensor, batch_size: int
) -> None:
    if images.ndim != 4 or not len(images):
        raise ValueError(f"images must be [B, C, H, W] with B > 0, got {list(images.shape)}")
    if labels.dtype != torch.int64:
        raise TypeError(f"labels must be int64, got {labels.dtype}")
    if labels.shape != images.shape[:1] or labels.min() < 0:
        raise ValueError(
            f"labels must be {len(images)} numbers of at least 0, got {list(labels.shape)} with "
            f"least {labels.min().item() if labels.numel() else None}"
        )
    if maps.ndim != 3 or len(maps) != len(images) or 0 in maps.shape:
        raise ValueError(
            f"maps must be [B, h, w] for images {list(images.shape)}, got {list(maps.shape)}"
        )
    if not maps.isfinite().all():
        raise ValueError("every score of maps must be finite")
    sides = zip(reversed(fill.shape), reversed(images.shape), strict=False)
    if fill.ndim > 4 or any(own not in (1, side) for own, side in sides):
        raise ValueError(
            f"fill must expand to the images' shape {list(images.shape)}, got {list(fill.shape)}"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
