"""deformable_attention by PyTorch's grid_sample, for a GPU and for what the kernels refuse.

It computes the definition's numbers in fewer passes over memory, and its backward pass is
grid_sample's own. That one has no derivative, so that the definition is written without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops._op import Backend
from vision_ttt.ops.deformable_attention.contract import Inputs

BILINEAR, ZEROS, ALIGN_CORNERS = 0, 0, False
"""grid_sample's interpolation, its padding, and whether 0 and 1 are the outermost cells' centres
instead of their edges."""


class _Level(NamedTuple):
    tokens: slice
    index: int
    value: Tensor  # [B · H, d, h, w]
    grid: Tensor  # [B · H, Q, P, 2] in -1 … 1


def _levels(inputs: Inputs, wide: torch.dtype) -> Iterator[_Level]:
    """Yield the levels as grid_sample takes them."""
    value, locations, _, _ = inputs
    start = 0
    for index, (height, width) in enumerate(inputs.levels()):
        tokens = slice(start, start + height * width)
        cells = value[:, tokens].to(wide).permute(0, 2, 3, 1)  # [B, H, d, h · w]
        # Points by -1 and 2 are outside already. grid_sample makes NaN of infinity.
        near = locations[:, :, :, index].to(wide).clamp(-2, 3)
        grid = 2 * near.transpose(1, 2) - 1
        yield _Level(
            tokens, index, cells.flatten(0, 1).unflatten(-1, (height, width)), grid.flatten(0, 1)
        )
        start = tokens.stop


def _precision(inputs: Inputs) -> torch.dtype:
    return torch.promote_types(inputs.value.dtype, torch.float32)


def _forward(inputs: Inputs) -> Tensor:
    value, locations, weights, _ = inputs
    wide, heads = _precision(inputs), value.shape[2]
    total = value.new_zeros(*locations.shape[:3], value.shape[3], dtype=wide)  # [B, Q, H, d]
    for level in _levels(inputs, wide):
        samples = torch.grid_sampler_2d(level.value, level.grid, BILINEAR, ZEROS, ALIGN_CORNERS)
        samples = samples.unflatten(0, (-1, heads)).permute(0, 3, 1, 2, 4)  # [B, Q, H, d, P]
        of_level = weights[:, :, :, level.index].to(wide).unsqueeze(-1)
        total += (samples @ of_level).squeeze(-1)
    return total.flatten(2).to(value.dtype)


def _backward(inputs: Inputs, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    value, locations, weights, _ = inputs
    wide, heads = _precision(inputs), value.shape[2]
    dvalue = value.new_empty(value.shape)
    dlocations, dweights = locations.new_empty(locations.shape), weights.new_empty(weights.shape)
    grad = grad.to(wide).unflatten(-1, (heads, -1)).permute(0, 2, 3, 1)  # [B, H, d, Q]
    for level in _levels(inputs, wide):
        samples = torch.grid_sampler_2d(level.value, level.grid, BILINEAR, ZEROS, ALIGN_CORNERS)
        samples = samples.unflatten(0, (-1, heads))  # [B, H, d, Q, P]
        of_level = weights[:, :, :, level.index].to(wide).transpose(1, 2)  # [B, H, Q, P]
        dsamples = grad.unsqueeze(-1) * of_level.unsqueeze(2)
        of_weights = (grad.unsqueeze(-1) * samples).sum(2)
        dweights[:, :, :, level.index] = of_weights.transpose(1, 2)
        of_cells, of_grid = torch.ops.aten.grid_sampler_2d_backward(
            dsamples.flatten(0, 1), level.value, level.grid,
            BILINEAR, ZEROS, ALIGN_CORNERS, [True, True],
        )  # fmt: skip
        dvalue[:, level.tokens] = of_cells.flatten(2).unflatten(0, (-1, heads)).permute(0, 3, 1, 2)
        # The grid is 2 · locations - 1.
        dlocations[:, :, :, level.index] = 2 * of_grid.unflatten(0, (-1, heads)).transpose(1, 2)
    return dvalue, dlocations, dweights


BACKEND = Backend(_forward, _backward, lambda inputs: None)
