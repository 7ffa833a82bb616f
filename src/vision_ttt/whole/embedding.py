"""The first block's tokens, band by band: patches of rows of pixels, and their positions."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.acceleration.packed_linear import PackedPatches
from vision_ttt.acceleration.supported_parts import UnsupportedPart
from vision_ttt.models.image_size import bicubic_matrix, check_image_size
from vision_ttt.models.linear_vit import LinearViT
from vision_ttt.models.plain_backbone import PlainBackbone
from vision_ttt.ops._native import LIBRARY
from vision_ttt.whole.errors import WholePictureError


class Picture(Protocol):
    """Pixels that are read in bands of rows, normalised as the model expects.

    A picture may have three further attributes. ``memory`` is the number of bytes that its library
    takes, for the plan. ``normalisation`` is how pixels are normalised; a run resumes only if its
    ``repr`` is the same. If ``has_gaps`` is True, ``has_data(first, last)`` returns a mask [n, W]
    of the pixels that have data. Pixels without data get the label 255.
    """

    channels: int
    height: int
    width: int
    identity: str
    """Distinguishes the picture from others, so that a run resumes only with the same one."""

    def read(self, first: int, last: int) -> Tensor:
        """Rows ``first`` … ``last`` - 1: [channels, last - first, width] float32."""


class Embedding:
    """The patch embedding and the positions of a model.

    Args:
        model: whose parameters are copied.
        pad: whether to pad pictures whose size is not a multiple of the patch size.
        dtype: of the packed weights.

    Raises:
        ValueError: the patches overlap, or the positions are rotations.
    """

    def __init__(self, model: PlainBackbone, *, pad: bool, dtype: torch.dtype) -> None:
        self.patch_embed, self.in_chans = model.patch_embed, model.in_chans
        self.dynamic, self.pad = model.dynamic_img_size, pad
        self.patch = tuple(model.patch_embed.patch_size)
        stride = tuple(model.patch_embed.proj.stride)
        if stride != self.patch:
            raise WholePictureError(
                f"patches of {self.patch} pixels at a stride of {stride} overlap;"
                " WholePictures needs patches that do not"
            )
        self.norm: nn.Module = nn.Identity()
        if isinstance(model, LinearViT):
            if model.rope is not None:
                raise WholePictureError("rotary positions have no form in bands")
            self.norm = copy.deepcopy(model.norm_pre).eval().float().requires_grad_(False)
        self.own_grid = tuple(model.patch_embed.grid_size)
        self.positions = None
        if model.pos_embed is not None:
            self.positions = model.pos_embed.detach().float().clone()
        self.proj: nn.Module = copy.deepcopy(model.patch_embed.proj).float().requires_grad_(False)
        if LIBRARY is not None:
            with suppress(UnsupportedPart):
                self.proj = PackedPatches(self.proj, dtype)

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of tokens of a picture (height, width).

        Raises:
            ValueError: the model does not accept the size.
        """
        if min(size) < 1:
            raise WholePictureError(f"a picture of {size[0]} × {size[1]} pixels has no tokens")
        shape = torch.empty(1, self.in_chans, *size, device="meta")
        check_image_size(shape, self.patch_embed, self.in_chans, dynamic=self.dynamic, pad=self.pad)
        height, width = (-(-side // patch) for side, patch in zip(size, self.patch, strict=True))
        return height, width

    def tokens(self, picture: Picture, grid: tuple[int, int], first: int, last: int) -> Tensor:
        """Tokens [1, n, D] of the rows ``first`` … ``last`` - 1 of the grid.

        Raises:
            ValueError: a pixel is NaN or infinite.
        """
        high, wide = self.patch
        rows = first * high, min(last * high, picture.height)
        pixels = picture.read(*rows)
        # One such pixel makes all tokens NaN, which a run would report only at its end.
        if not pixels.isfinite().all():
            raise WholePictureError(
                f"the picture has NaN or infinite pixels in its rows {rows[0]} to {rows[1] - 1};"
                " for a file, the reader raster replaces NaN by the mean"
            )
        missing = (last - first) * high - pixels.shape[1], grid[1] * wide - pixels.shape[2]
        if any(missing):
            pixels = F.pad(pixels, (0, missing[1], 0, missing[0]))
        x = self.proj(pixels.unsqueeze(0)).permute(0, 2, 3, 1).flatten(1, 2)
        return self.norm(x if self.positions is None else x + self._positions(grid, first, last))

    def _positions(self, grid: tuple[int, int], first: int, last: int) -> Any:
        """The positions of some rows; see :func:`vision_ttt.models.image_size.positions_for`."""
        if grid == self.own_grid:
            return self.positions[:, first * grid[1] : last * grid[1]]
        x = self.positions.view(*self.own_grid, -1)
        rows, columns = (
            bicubic_matrix(old, new, x) for old, new in zip(self.own_grid, grid, strict=True)
        )
        x = columns @ (rows[first:last] @ x.flatten(1)).unflatten(1, x.shape[1:])
        return x.flatten(0, 1).unsqueeze(0)
