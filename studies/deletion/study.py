"""Do maps of importance mean anything? Deletion and insertion curves of many maps of one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from timm.models import VisionTransformer
from torch import Tensor, nn

from studies.deletion.curves import (
    area_under,
    deletion_curve,
    insertion_curve,
    mean_colour,
    whole_token_shares,
)
from studies.deletion.grad_cam import grad_cam
from studies.deletion.gradient_input import gradient_times_input, token_sums
from studies.deletion.rollout import attention_rollout
from vision_ttt.explain.feature_maps import token_grid
from vision_ttt.explain.gradient_maps import (
    STATES,
    gradient_layers,
    gradient_magnitude,
    mean_map,
    states_of,
)

RANDOM = "random"
"""Name of the method that every other one is compared with."""


@dataclass(frozen=True)
class Method:
    """A way to score an image's tokens."""

    maps: Callable[[nn.Module, Tensor, Tensor], Tensor]
    """Model, images [B, C, H, W] and their true classes [B] → scores [B, h, w]."""
    fits: Callable[[nn.Module], bool]
    """Whether the method has a map of such a model."""


@dataclass(frozen=True)
class MapCurves:
    """What one method's maps gave with one fill: means over the images, and over the draws."""

    method: str
    """A name of :data:`METHODS`."""
    fill: str
    draws: int
    """Orders per image; 1 unless the order is random."""
    shares: tuple[float, ...]
    """Of the tokens, removed or revealed."""
    deletion: tuple[float, ...]
    """Probability of the true class at each share."""
    insertion: tuple[float, ...]

    @property
    def deletion_area(self) -> float:
        """Area under the curve of deletion: small where the map marks what the model uses."""
        return _area(self.deletion, self.shares)

    @property
    def insertion_area(self) -> float:
        """Area under the curve of insertion: large where the map marks what the model uses."""
        return _area(self.insertion, self.shares)


def measure_maps(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    fills: Mapping[str, Tensor],
    methods: Sequence[str] | None = None,
    points: int = 11,
    draws: int = 3,
    batch_size: int = 64,
    fast: nn.Module | None = None,
    on_curve: Callable[[], None] = lambda: None,
) -> list[MapCurves]:
    """Deletion and insertion curves of a model by every method that has a map of it.

    Args:
        model: a classifier whose tokens' grid is known, see
            :func:`vision_ttt.explain.feature_maps.token_grid`. It stays as it is.
        images: [B, C, H, W], normalised as for the model.
        labels: the true classes [B], int64.
        fills: name → what removed pixels are replaced by, see
            :func:`studies.deletion.curves.deletion_curve`.
        methods: names of :data:`METHODS`; None for all that fit the model.
        points: of each curve.
        draws: random orders, over which the curves of :data:`RANDOM` are averaged.
        batch_size: images at once.
        fast: a model of the same outputs for the curves, e.g. of
            :func:`vision_ttt.acceleration.for_inference`; by default the model itself.
        on_curve: called after each method and fill.

    Returns:
        The curves of each method and fill, in their order.

    Raises:
        TypeError: the model's grid of tokens is not known.
        ValueError: a method is unknown or has no map of this model, or a number is out of its
            range; others as :func:`studies.deletion.curves.deletion_curve` raises them.
    """
    (height, width), patch = token_grid(model, images)
    fitting = methods_for(model)
    unfit = [name for name in methods or () if name not in fitting]
    if unfit:
        raise ValueError(
            f"{type(model).__name__} has no map by {', '.join(unfit)}; it has those by "
            f"{', '.join(fitting)}"
        )
    if draws < 1 or batch_size < 1:
        raise ValueError(f"draws and batch_size must be at least 1, got {draws} and {batch_size}")
    shares = whole_token_shares(height * width, points)
    results = []
    for name in methods or fitting:
        maps = torch.cat(
            [
                METHODS[name].maps(model, *batch).detach()
                for batch in zip(images.split(batch_size), labels.split(batch_size), strict=True)
            ]
        )
        seeds = range(draws) if name == RANDOM else range(1)
        for fill, replacement in fills.items():
            curves = {}
            for curve in (deletion_curve, insertion_curve):
                own = [
                    curve(
                        *(fast or model, images, labels, maps, shares),
                        fill=replacement,
                        patch=patch,
                        batch_size=batch_size,
                        seed=seed,
                    )
                    for seed in seeds
                ]
                curves[curve] = tuple(torch.stack(own).mean((0, 1)).tolist())
            results.append(
                MapCurves(
                    *(name, fill, len(seeds), tuple(shares)),
                    deletion=curves[deletion_curve],
                    insertion=curves[insertion_curve],
                )
            )
            on_curve()
    return results


def methods_for(model: nn.Module) -> list[str]:
    """The names of :data:`METHODS` that have maps of a model."""
    return [name for name, method in METHODS.items() if method.fits(model)]


def _area(curve: Sequence[float], shares: Sequence[float]) -> float:
    return area_under(torch.tensor(curve, dtype=torch.float32, device="cpu"), shares).item()


def _any(model: nn.Module) -> bool:
    return True


def _constant(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Maps of equal scores, whose order is random."""
    grid, _ = token_grid(model, images)
    return torch.zeros(len(images), *grid, dtype=torch.float32, device=images.device)


def _centre(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Minus the distance from the image's centre, in multiples of its sides."""
    grid, patch = token_grid(model, images)
    places = []
    for side, count, step in zip(images.shape[2:], grid, patch, strict=True):
        edges = torch.arange(count + 1, dtype=torch.float32, device=images.device) * step
        edges[-1] = side  # the last token has what is left
        places.append((edges[:-1] + edges[1:]) / 2 / side - 0.5)
    distance = torch.hypot(*torch.meshgrid(*places, indexing="ij"))
    return -distance.expand(len(images), -1, -1)


def _contrast(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Root mean square difference of each token's pixels from the mean colour of their image."""
    grid, patch = token_grid(model, images)
    squares = (images.float() - mean_colour(images).float()).square().mean(1)
    pixels = token_sums(torch.ones_like(squares), grid, patch)
    return (token_sums(squares, grid, patch) / pixels).sqrt()


def _magnitude(model: nn.Module, images: Tensor, labels: Tensor, *, state: str) -> Tensor:
    return mean_map(gradient_magnitude(model, images, state=state, layers=[-1]))


def _has_state(model: nn.Module, *, state: str) -> bool:
    layers = gradient_layers(model).values()
    return bool(layers) and all(state in states_of(layer) for layer in layers)


METHODS: dict[str, Method] = {
    RANDOM: Method(_constant, _any),
    "centre": Method(_centre, _any),
    "contrast": Method(_contrast, _any),
    **{
        f"gradient magnitude, {state}": Method(
            partial(_magnitude, state=state), partial(_has_state, state=state)
        )
        for state in STATES
    },
    "attention rollout": Method(
        lambda model, images, _labels: attention_rollout(model, images),
        lambda model: isinstance(model, VisionTransformer),
    ),
    "gradient × input": Method(gradient_times_input, _any),
    "Grad-CAM": Method(grad_cam, _any),
}
"""Name → method. Random order and distance from the centre know nothing of the image, contrast
nothing of the model; gradient × input and Grad-CAM are told the true class, gradient magnitude and
attention rollout are not."""
