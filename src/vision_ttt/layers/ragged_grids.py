"""Images of several grids as one sequence of tokens: ragged batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Group(NamedTuple):
    """Images of one grid: how many, the tokens N of each, and what a block is given for them.

    ``context`` are a block's arguments behind the tokens: the grid (h, w), and in models with
    tokens outside of it their positions.
    """

    count: int
    length: int
    context: tuple[Any, ...]


class RaggedGrids:
    """The grids of images whose tokens [1, S, D] are one sequence, in the place of a grid (h, w).

    What treats each token alone (norms, projections, MLPs) runs on the sequence as it is. What
    mixes tokens runs on [B, N, …] of the B images of one grid, which are side by side, group after
    group. There is no padding. Layers and blocks that take a grid accept these. ::

        grids = RaggedGrids.of([(6, 6), (6, 6), (8, 12)])
        y = block(torch.cat([a, b, c], dim=1), grids)      # a, b [1, 36, D], c [1, 96, D]

    Args:
        groups: the images.
    """

    def __init__(self, groups: Iterable[Group]) -> None:
        self.groups = tuple(groups)
        self._sizes = [count * length for count, length, _ in self.groups]

    @classmethod
    def of(
        cls,
        grids: Sequence[tuple[int, int]],
        positions: Callable[[int], tuple[int, ...]] = lambda area: (),
    ) -> RaggedGrids:
        """Of images by their grids, in the order of their tokens.

        Args:
            grids: (h, w) of each image.
            positions: of the tokens outside the grid in the sequence of an image, by the number of
                its tokens on the grid, as :meth:`vision_ttt.layers.ExtraTokens.positions`; by
                default there are none.

        Raises:
            ValueError: there is no image, or a side is below 1.
        """
        if not grids or any(min(grid) < 1 for grid in grids):
            raise ValueError(f"grids must be (h, w) of at least 1 token each, got {list(grids)}")
        groups: list[Group] = []
        for height, width in grids:
            area = height * width
            extra = positions(area)
            context = ((height, width), extra) if extra else ((height, width),)
            count = 1
            if groups and groups[-1].context == context:
                count += groups.pop().count
            groups.append(Group(count, area + len(extra), context))
        return cls(groups)

    def check(self, length: int) -> None:
        """Require a sequence of all images' tokens.

        Raises:
            ValueError: there are more or fewer.
        """
        if length != sum(self._sizes):
            raise ValueError(
                f"{length} tokens are not those of the images, {sum(self._sizes)}: {self}"
            )

    def split(self, x: Tensor) -> list[Tensor]:
        """x [1, S, …] → [B, N, …] of each group.

        Raises:
            ValueError: it is not one sequence of all images' tokens.
        """
        if x.shape[0] != 1:
            raise ValueError(
                f"images of several grids are one sequence [1, S, …], got {x.shape[0]}"
            )
        self.check(x.shape[1])
        return [
            part.unflatten(0, (count, length))
            for part, (count, length, _) in zip(
                x.squeeze(0).split(self._sizes), self.groups, strict=True
            )
        ]

    def each(self, function: Callable[..., Tensor], *tokens: Tensor, on_grid: bool) -> Tensor:
        """Results [1, S, …] of a function of the tokens [B, N, …] of each group.

        Args:
            function: called with each group's part of ``tokens``; with ``on_grid`` also with what a
                block is given for it.
            tokens: [1, S, …] each.
        """
        parts = zip(*(self.split(x) for x in tokens), strict=True)
        results = [
            function(*part, *(group.context if on_grid else ()))
            for part, group in zip(parts, self.groups, strict=True)
        ]
        return torch.cat([result.flatten(0, 1) for result in results]).unsqueeze(0)

    def __repr__(self) -> str:
        return " and ".join(
            f"{count} of {context[0][0]} × {context[0][1]}" for count, _, context in self.groups
        )


def each_image(layer: Callable[..., Tensor], x: Tensor, grid: Any) -> Tensor:
    """``layer(x)`` for a sequence layer; with :class:`RaggedGrids` each image is a sequence."""
    return grid.each(layer, x, on_grid=False) if isinstance(grid, RaggedGrids) else layer(x)


def each_on_grid(
    function: Callable[..., Tensor], tokens: tuple[Tensor, ...], grid: Any, *others: Any
) -> Tensor:
    """``function(*tokens, grid, *others)``; with :class:`RaggedGrids` of each group of images.

    A function or module whose attribute ``takes_grids`` is True is called once, as
    ``function(*tokens, grid)``.

    Raises:
        ValueError: there are others beside :class:`RaggedGrids`.
    """
    if not isinstance(grid, RaggedGrids):
        return function(*tokens, grid, *others)
    refuse_beside(others)
    if getattr(function, "takes_grids", False):
        return function(*tokens, grid)
    return grid.each(function, *tokens, on_grid=True)


def refuse_beside(others: Iterable[Any]) -> None:
    """Refuse a block's other arguments beside ragged grids, which have those of each image.

    Raises:
        ValueError: one is neither None nor empty.
    """
    if any(other is not None and len(other) for other in others):
        raise ValueError(
            "images of several grids have their blocks' other arguments in RaggedGrids (positions=…"
            " of RaggedGrids.of); give none beside them"
        )


def drop_each(drop_path: nn.Module, branch: Tensor, grid: Any) -> Tensor:
    """Stochastic depth, which drops the branch of an image, not of all."""
    drops = drop_path.training and not isinstance(drop_path, nn.Identity)
    return each_image(drop_path, branch, grid) if drops else drop_path(branch)
