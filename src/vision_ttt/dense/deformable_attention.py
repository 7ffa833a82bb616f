"""Multi-scale deformable attention: a query reads a few learned places of several maps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vision_ttt.ops.deformable_attention import deformable_attention

Grid = tuple[int, int]
"""(h, w), rows and columns of tokens."""


def centres(grid: Grid, *, like: Tensor) -> Tensor:
    """The centres of a grid's cells, [h · w, 2] as (x, y) in 0…1, row by row.

    Their dtype is that of ``like``, at least float32.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    rows, columns = (
        (torch.arange(count, device=like.device, dtype=dtype) + 0.5) / count for count in grid
    )
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    return torch.stack((x, y), dim=-1).flatten(0, 1)


def _softmax(x: Tensor) -> Tensor:
    """Over the last axis; for a few numbers several times as fast on a CPU as PyTorch's."""
    x = (x - x.detach().amax(-1, keepdim=True)).exp()
    return x / x.sum(-1, keepdim=True)


class DeformableAttention(nn.Module):
    """Multi-scale deformable attention (Deformable DETR, Eq. 3) of tokens to tokens on grids.

    Query q, at the place p_q of the image, reads P places in each of L maps::

        out_q = W_out Σ_levels Σ_points a_qlp · (W_value x_l)(p_q + δ_qlp)

    with the offsets δ, in cells of the map l, and the weights a, which sum to 1 over levels and
    points, linear in the query; per head. A map is interpolated bilinearly and zero beyond its
    edges. Places, weights and sums are float32 at least.

    Args:
        dim: D.
        heads: H.
        levels: L.
        points: P.
        ratio: channels of the values over D.

    Initialisation: the offsets of a head point in a direction of its own, of lengths 1…P, and do
    not depend on the query; weights are equal; projections Xavier uniform, biases zero.

    Raises:
        ValueError: ratio · D is not a positive multiple of H.
    """

    def __init__(self, dim: int, *, heads: int, levels: int, points: int, ratio: float) -> None:
        super().__init__()
        width = round(dim * ratio)
        if width < heads or width % heads:
            raise ValueError(
                f"{heads} heads do not divide the values' {width} channels (ratio {ratio} of {dim})"
            )
        self.heads, self.levels, self.points = heads, levels, points
        self.sampling = nn.Linear(dim, 3 * heads * levels * points)  # offsets, then weights
        self.value = nn.Linear(dim, width)
        self.out = nn.Linear(width, dim)
        nn.init.zeros_(self.sampling.weight)
        with torch.no_grad():
            self.sampling.bias.zero_()
            self.sampling.bias[: 2 * heads * levels * points] = self._first_offsets().flatten()
        for projection in (self.value, self.out):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def _first_offsets(self) -> Tensor:
        """[H, L, P, 2]: directions of equal angles, scaled to the edge of a square."""
        angles = torch.arange(self.heads) * (2 * math.pi / self.heads)
        directions = torch.stack((angles.cos(), angles.sin()), dim=-1)
        directions = directions / directions.abs().amax(-1, keepdim=True)
        lengths = torch.arange(1, self.points + 1)
        offsets = directions[:, None, None] * lengths[:, None]
        return offsets.expand(-1, self.levels, -1, -1)

    def forward(
        self, queries: Tensor, places: Tensor, tokens: Tensor, grids: Sequence[Grid]
    ) -> Tensor:
        """Attend.

        Args:
            queries: [B, Q, D].
            places: [Q, 2], the queries' as (x, y) in 0…1, of :func:`centres`.
            tokens: [B, S, D], of the L grids one after the other.
            grids: (h, w) of each level, S in total.

        Returns:
            [B, Q, D].
        """
        shape = (self.heads, self.levels, self.points)
        count = math.prod(shape)
        sampling = self.sampling(queries).to(places.dtype)
        offsets, logits = sampling.split((2 * count, count), dim=-1)
        cells = places.new_tensor([(w, h) for h, w in grids])
        offsets = offsets.unflatten(-1, (*shape, 2)) / cells[:, None]
        locations = places[:, None, None, None] + offsets  # [B, Q, H, L, P, 2]
        weights = _softmax(logits.unflatten(-1, (self.heads, -1))).unflatten(-1, shape[1:])
        value = self.value(tokens).unflatten(-1, (self.heads, -1))  # [B, S, H, d]
        return self.out(deformable_attention(value, locations, weights, grids))
