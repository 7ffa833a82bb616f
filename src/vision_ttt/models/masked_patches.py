"""Image tokens replaced by a mask token, and image tokens left out of the sequence."""

from __future__ import annotations

import torch
from torch import Tensor


def mask_tokens(x: Tensor, mask: Tensor, token: Tensor | None) -> Tensor:
    """Replace the tokens x [B, T, D] where mask [B, T] is True by ``token`` [1, 1, D].

    Raises:
        TypeError: the mask is not a tensor.
        ValueError: there is no token, or the mask is not a bool for each of the B · T tokens.
    """
    if token is None:
        raise ValueError("mask: this model has no mask token; call add_mask_token() first")
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a tensor of bool, got {type(mask).__name__}")
    if mask.dtype != torch.bool or mask.shape != x.shape[:2]:
        raise ValueError(
            f"mask must be bool {list(x.shape[:2])}, a value for each image token, got"
            f" {str(mask.dtype).removeprefix('torch.')} {list(mask.shape)}"
        )
    return torch.where(mask.unsqueeze(-1), token.to(x.dtype), x)


def drop_tokens(
    x: Tensor, grid: tuple[int, int], rate: float, *, whole_lines: bool
) -> tuple[Tensor, tuple[int, int]]:
    """Leave out about a share ``rate`` of the tokens x [B, T, D] of a grid (h, w), at random.

    Each image loses other tokens; those that are kept stay in their order.

    Args:
        whole_lines: leave out whole rows and columns of the grid, so that a smaller grid of about
            h √(1 - rate) rows and w √(1 - rate) columns is left, at least one of each. If a side of
            the grid is too short for its share, more of the other side is kept. Otherwise
            round((1 - rate) T) tokens are kept, wherever they are.

    Returns:
        The tokens that are kept, and their grid; without whole lines it is one row.
    """
    kept = 1 - rate
    if not whole_lines:
        x = _kept(x, 1, max(1, round(kept * x.shape[1])))
        return x, (1, x.shape[1])
    height, width = grid
    rows = max(1, round(height * kept**0.5))
    columns = min(width, max(1, round(kept * height * width / rows)))
    rows = min(height, max(1, round(kept * height * width / columns)))
    x = _kept(_kept(x.unflatten(1, grid), 1, rows), 2, columns)
    return x.flatten(1, 2), (rows, columns)


def _kept(x: Tensor, dim: int, count: int) -> Tensor:
    """``count`` entries of x [B, …] along a dimension, in their order, others for each image."""
    places = torch.rand(x.shape[0], x.shape[dim], device=x.device).argsort(1)[:, :count]
    shape = [x.shape[0], *(count if axis == dim else 1 for axis in range(1, x.ndim))]
    return x.take_along_dim(places.sort(1).values.view(shape), dim)
