"""Images of any shapes in one batch, as timm's NaFlex loader collates them.

A batch is a dictionary of "patches" [B, N, P · P · C], their rows and columns "patch_coord"
[B, N, 2] and "patch_valid" [B, N], which is False at the padding. Nothing of the padding is
computed: only valid patches are gathered, those of images of one grid side by side, and the blocks
run on the images of one grid at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

KEYS = ("patches", "patch_coord", "patch_valid")
"""Of a batch. Others, such as timm's "seq_len", are ignored."""


class Group(NamedTuple):
    """Images of one grid: how many, the tokens N of each, and what the blocks are given for them.

    ``context`` are the blocks' arguments behind the tokens: the grid (h, w), and in models with
    tokens outside of it their positions.
    """

    count: int
    length: int
    context: tuple[Any, ...]


class NaFlexBatch:
    """Where the images of a batch are, and their tokens in one sequence [1, S, D], group by group.

    Args:
        batch: with "patch_coord" and "patch_valid".

    Attributes:
        coord, valid: as in the batch.
        groups: the images of each grid.

    Raises:
        TypeError, ValueError: the batch is not as above, or the valid patches of an image do not
            fill a grid.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self.coord, self.valid = coord, valid = _checked(batch)
        length = valid.shape[1]
        order, grids = _grids(coord, valid)
        alike: dict[tuple[int, int], list[int]] = {}
        for index, grid in enumerate(grids):
            alike.setdefault(grid, []).append(index)
        images = torch.tensor(list(chain(*alike.values())), device=valid.device)
        self._images, self._inverse = images, images.argsort()
        self.groups: Sequence[Group] = [
            Group(len(each), h * w, ((h, w),)) for (h, w), each in alike.items()
        ]
        taken = [order.new_zeros(0)]
        counts = [group.count for group in self.groups]
        for group, each in zip(self.groups, images.split(counts), strict=True):
            taken.append((order[each, : group.length] + each.unsqueeze(1) * length).flatten())
        self._index = torch.cat(taken)

    def with_context(self, groups: Sequence[Group]) -> NaFlexBatch:
        """The same images, whose blocks are given something else."""
        other = copy.copy(self)
        other.groups = groups
        return other

    def split(self, x: Tensor) -> list[Tensor]:
        """x [1, S, …] → [B, N, …] of each group."""
        parts = x.squeeze(0).split([count * length for count, length, _ in self.groups])
        return [
            part.unflatten(0, (count, length))
            for part, (count, length, _) in zip(parts, self.groups, strict=True)
        ]

    def each(self, blocks: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Tokens x [1, S, D] after blocks that are called with each group and its context."""
        parts = zip(self.split(x), self.groups, strict=True)
        results = [blocks(part, *group.context) for part, group in parts]
        return torch.cat([result.flatten(0, 1) for result in results]).unsqueeze(0)

    def gather(self, x: Tensor) -> Tensor:
        """x [B, N, …] → the image tokens [1, S, …]."""
        return x.flatten(0, 1)[self._index].unsqueeze(0)

    def scatter(self, groups: list[Tensor]) -> Tensor:
        """Image tokens [B, T, D] of each group → [B, N, D] as the patches, 0 at the padding."""
        x = torch.cat([group.flatten(0, 1) for group in groups])
        out = x.new_zeros(self.valid.numel(), x.shape[-1]).index_copy(0, self._index, x)
        return out.unflatten(0, self.valid.shape)

    def split_images(self, x: Tensor) -> list[Tensor]:
        """x [B, …] of the images → [B, …] of each group: :meth:`in_order` undone."""
        if len(x) != len(self.valid):
            raise ValueError(f"{len(x)} images are not those of the batch, {len(self.valid)}")
        return x[self._images].split([group.count for group in self.groups])

    def in_order(self, groups: list[Tensor]) -> Tensor:
        """Results [B, …] of each group in the batch's order of images."""
        return torch.cat(groups)[self._inverse]


def flat_patches(batch: Mapping[str, Any], size: tuple[int, int], channels: int) -> Tensor:
    """A batch's patches [B, N, P · P · C].

    Raises:
        TypeError, ValueError: they are no tensor of floating point, or of another shape.
    """
    patches = batch["patches"]
    if not isinstance(patches, Tensor) or not patches.is_floating_point():
        raise TypeError(f"patches must be a tensor of floating point, got {_kind(patches)}")
    patch = (*size, channels)
    area = size[0] * size[1] * channels
    if patches.ndim == 5 and tuple(patches.shape[2:]) == patch:
        patches = patches.flatten(2)
    places = batch["patch_valid"].shape
    if patches.ndim != 3 or patches.shape[2] != area or patches.shape[:2] != places:
        raise ValueError(
            f"patches must be [{places[0]}, {places[1]}, {area}], of {size[0]} × {size[1]} pixels"
            f" and {channels} channels, channels last, got {list(patches.shape)}"
        )
    return patches


def _checked(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    missing = [key for key in KEYS if key not in batch]
    if missing:
        raise ValueError(
            f"a batch of images of any shapes has {', '.join(KEYS)}; it lacks {', '.join(missing)},"
            f" got {sorted(map(str, batch))}"
        )
    coord, valid = batch["patch_coord"], batch["patch_valid"]
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool:
        raise TypeError(f"patch_valid must be a tensor of bool, got {_kind(valid)}")
    if not isinstance(coord, Tensor) or coord.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"patch_coord must be a tensor of int64 or int32, got {_kind(coord)}")
    if valid.ndim != 2 or not valid.numel() or tuple(coord.shape) != (*valid.shape, 2):
        raise ValueError(
            "patch_valid must be [B, N] of at least one patch and patch_coord [B, N, 2], got "
            f"{list(valid.shape)} and {list(coord.shape)}"
        )
    if valid.device != coord.device:
        raise ValueError(
            f"patch_valid and patch_coord must be on one device, got {valid.device} and "
            f"{coord.device}"
        )
    return coord, valid


def _kind(x: Any) -> str:
    return str(x.dtype) if isinstance(x, Tensor) else type(x).__name__


def _grids(coord: Tensor, valid: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """The places [B, N] of each image's patches row by row, padding behind them; the grids."""
    rows, columns = coord.long().unbind(-1)
    # Beyond these a place could overflow, or be that of another row.
    inside = ((coord >= 0) & (coord < coord.shape[1])).all(-1) | ~valid
    height, width = ((x + 1).masked_fill(~valid, 0).amax(1) for x in (rows, columns))
    place = (rows * width.unsqueeze(1) + columns).masked_fill(~valid, torch.iinfo(torch.long).max)
    place, order = place.sort(dim=1)
    expected = torch.arange(place.shape[1], device=place.device)
    behind = expected >= valid.sum(1, keepdim=True)
    fills = ((place == expected) | behind).all(1) & (valid.sum(1) == height * width)
    fills &= inside.all(1)
    grids = []
    for index, (h, w, count, full) in enumerate(
        torch.stack([height, width, valid.sum(1), fills.long()], dim=1).tolist()
    ):
        if not full or not count:
            raise ValueError(
                f"image {index} of the batch has {count} valid patches, which do not fill its grid"
                f" of {h} × {w}: patch_coord must have each row and column once"
            )
        grids.append((h, w))
    return order, grids
