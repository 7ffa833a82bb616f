"""Effective receptive field: which pixels the feature in the middle of an image responds to."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vision_ttt.explain.feature_maps import check_images, feature_maps
from vision_ttt.explain.inner_loop import refuse_without_gradients
from vision_ttt.models.evaluation_mode import evaluation_mode

_AT_ONCE = 8
"""Images whose graph is held at a time."""


def receptive_field(
    model: nn.Module, images: Tensor, *, token: str | tuple[int, int] = "centre"
) -> Tensor:
    """Mean response of a token's feature to every pixel (Vision-TTT, Fig. 8; Luo et al., 2016)::

        field_ij = 1/B Σ_b Σ_c |∂ Σ_d y_bd / ∂ image_bcij|

    y is the feature after the last block or stage, before a final norm: such a norm would fix the
    sum over channels, which then has no gradient at all.

    Args:
        model: any backbone with timm's ``forward_intermediates``: Vittt and its designs, ViT³,
            H-ViT³, Vim, Mamba-Reg, timm's VisionTransformer, ResNet and others. It is not
            modified.
        images: [B, C, H, W], normalised as for the model. With few images the field also depends on
            their content; 50 images are usual.
        token: (row, column) on the grid of the last features, or "centre" for the feature in the
            middle of the image: of a side with an even number of tokens, the mean of the middle
            two. The field then lies around the middle of the image on every grid.

    Returns:
        [H, W], float32, ≥ 0, in units of features per unit of the normalised image.

    Raises:
        TypeError: the model is not such a backbone, or has no gradients, as one of
            ``for_inference``.
        ValueError: the images do not fit the model, or it has no such token.
        RuntimeError: called within ``torch.inference_mode``.
    """
    refuse_without_gradients(model)
    check_images(images)
    field = torch.zeros(images.shape[-2:], dtype=torch.float32, device=images.device)
    with evaluation_mode(model), torch.enable_grad():
        for part in images.split(_AT_ONCE):
            pixels = part.detach().clone().requires_grad_()
            response = _feature(feature_maps(model, pixels, last=True)[-1], token).sum()
            if not response.requires_grad:
                raise TypeError(f"{type(model).__name__} has no gradients: give the trained model")
            (gradient,) = torch.autograd.grad(response, pixels)
            field += gradient.float().abs().sum((0, 1))
    return field / len(images)


def _feature(features: Tensor, token: str | tuple[int, int]) -> Tensor:
    """The token's feature [B, D] of maps [B, D, h, w], float32."""
    h, w = features.shape[-2:]
    if token == "centre":
        middle = features[..., (h - 1) // 2 : h // 2 + 1, (w - 1) // 2 : w // 2 + 1]
        return middle.float().mean((-2, -1))
    if isinstance(token, str) or len(token) != 2:
        raise ValueError(f"token must be 'centre' or (row, column), got {token!r}")
    row, column = token
    if not (0 <= row < h and 0 <= column < w):
        raise ValueError(f"token must be within the grid of {h} × {w} tokens, got {token}")
    return features[..., row, column].float()


def energy_within(
    field: Tensor, radius: float, *, centre: tuple[float, float] | None = None
) -> float:
    """Share of a field's energy within a radius, from 0 to 1.

    The energy is the sum of the field, that is of the absolute responses. A pixel counts where its
    centre lies within the radius.

    Args:
        field: [H, W] of :func:`receptive_field`.
        radius: in pixels, ≥ 0.
        centre: (row, column) in pixels, (0, 0) being the centre of the first pixel; by default the
            middle of the field. Convolutions of an odd kernel with stride and padding respond
            around a point half a stride above and left of their token's middle.

    Raises:
        ValueError: the field is not [H, W], finite, ≥ 0 and somewhere above 0, the radius is
            negative, or the centre lies outside.
    """
    if not radius >= 0:
        raise ValueError(f"radius must be at least 0, got {radius}")
    field = _checked(field)
    near = _distances(field, centre) <= radius
    return (field[near].sum() / field.sum()).item()


def radial_profile(field: Tensor, *, centre: tuple[float, float] | None = None) -> Tensor:
    """Mean response of the ring of pixels at each distance: of those from r to below r + 1.

    Args:
        field: [H, W] of :func:`receptive_field`.
        centre: as in :func:`energy_within`.

    Returns:
        [R], float32 on the CPU, r = 0 … R - 1 up to the farthest pixel; NaN for a ring without
        pixels.

    Raises:
        ValueError: as in :func:`energy_within`.
    """
    field = _checked(field)
    rings = _distances(field, centre).floor().long().flatten()
    counts = torch.bincount(rings)
    return (torch.bincount(rings, weights=field.flatten()) / counts).float()


def centroid_offset(
    field: Tensor, *, centre: tuple[float, float] | None = None
) -> tuple[float, float]:
    """How far the centroid of a field lies below and right of its centre, in pixels.

    A scan in one direction sees earlier tokens only: its centroid lies above, at a negative offset.

    Args:
        field: [H, W] of :func:`receptive_field`.
        centre: as in :func:`energy_within`.

    Raises:
        ValueError: as in :func:`energy_within`.
    """
    field = _checked(field)
    down, right = ((field * each).sum() / field.sum() for each in _offsets(field, centre))
    return down.item(), right.item()


def anisotropy(field: Tensor) -> float:
    """Length over width of a field: 1 for a radial one, k for one stretched k-fold.

    It is the ratio of the axes of the ellipse of second moments: √(λ_1 / λ_2), λ_1 ≥ λ_2 the
    eigenvalues of the covariance of the pixels' positions around the centroid, weighted by the
    field. Far pixels count by their squared distance: on an image that is not square, a field that
    covers all of it has the image's aspect ratio.

    Args:
        field: [H, W] of :func:`receptive_field`.

    Returns:
        At least 1; infinity for a line of single pixels, 1 for one pixel.

    Raises:
        ValueError: the field is not [H, W], finite, ≥ 0 and somewhere above 0.
    """
    field = _checked(field)
    share = (field / field.sum()).flatten()
    positions = torch.stack([each.flatten() for each in _offsets(field, None)])  # [2, H · W]
    centred = positions - (positions @ share)[:, None]
    narrow, long = torch.linalg.eigvalsh((centred * share) @ centred.mT).clamp_min(0).tolist()
    if long == 0:
        return 1.0
    return math.sqrt(long / narrow) if narrow > 1e-12 * long else math.inf


def _checked(field: Tensor) -> Tensor:
    """The field in float64 on the CPU."""
    exact = field.detach().cpu().double()
    if exact.ndim != 2 or not exact.isfinite().all() or (exact < 0).any() or not exact.any():
        raise ValueError(
            "a field must be [H, W], finite, at least 0 everywhere and above 0 somewhere, got "
            f"{list(field.shape)} with sum {exact.sum().item():g}"
        )
    return exact


def _offsets(field: Tensor, centre: tuple[float, float] | None) -> tuple[Tensor, Tensor]:
    """Every pixel's rows below and columns right of the centre, both [H, W]."""
    h, w = field.shape
    row, column = ((h - 1) / 2, (w - 1) / 2) if centre is None else centre
    if not (-0.5 <= row <= h - 0.5 and -0.5 <= column <= w - 0.5):
        raise ValueError(f"centre must lie within the field of {h} × {w} pixels, got {centre}")
    rows = torch.arange(h, dtype=field.dtype, device=field.device) - row
    columns = torch.arange(w, dtype=field.dtype, device=field.device) - column
    down, right = torch.meshgrid(rows, columns, indexing="ij")
    return down, right


def _distances(field: Tensor, centre: tuple[float, float] | None) -> Tensor:
    """Pixels from the centre, [H, W]."""
    down, right = _offsets(field, centre)
    return torch.hypot(down, right)
