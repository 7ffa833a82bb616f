"""The definition of deformable_attention, in PyTorch's operations."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops.deformable_attention.contract import Inputs


def deformable_attention_definition(inputs: Inputs) -> Tensor:
    """See :func:`vision_ttt.ops.deformable_attention.deformable_attention`."""
    value, locations, weights, _ = inputs
    # A location in bfloat16 is exact to 1/256 of the image only: coordinates need more.
    wide = torch.promote_types(value.dtype, torch.float32)
    heads = value.to(wide).transpose(1, 2)  # [B, H, S, d]
    locations, weights = (x.to(wide).transpose(1, 2) for x in (locations, weights))
    start, total = 0, 0
    for level, (height, width) in enumerate(inputs.levels()):
        cells = heads[:, :, start : start + height * width]
        x, y = locations[:, :, :, level].unbind(-1)  # [B, H, Q, P]
        for row, of_row in _neighbours(y, height):
            for column, of_column in _neighbours(x, width):
                index = (row * width + column).flatten(2).unsqueeze(-1)  # [B, H, Q · P, 1]
                corner = cells.gather(2, index.expand(*index.shape[:3], cells.shape[-1]))
                share = (of_row * of_column * weights[:, :, :, level]).unsqueeze(-1)
                total = total + (share * corner.unflatten(2, x.shape[2:])).sum(-2)
        start += height * width
    return total.transpose(1, 2).flatten(2).to(value.dtype)  # [B, Q, H · d]


def _neighbours(location: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """The two cells around each location on an axis, and their bilinear weights, 0 outside."""
    # Beyond a cell outside all weights are 0. Infinity minus its floor would be NaN. At the limits
    # clamp has no gradient, and a point by -1 still has one.
    place = (location * size - 0.5).clamp(-2, size)
    floor = place.detach().floor()
    rest = place - floor
    found = []
    for cell, share in ((floor, 1 - rest), (floor + 1, rest)):
        outside = (cell < 0) | (cell > size - 1)
        index = cell.nan_to_num(0).clamp(0, size - 1).long()
        found.append((index, share.masked_fill(outside, 0)))
    return found
