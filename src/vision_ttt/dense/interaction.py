"""The parts of ViT-Adapter: a spatial prior, injectors and extractors between it and a backbone.

Shape letters: B images, T tokens of the backbone, S tokens of the pyramid, D width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from vision_ttt.dense.deformable_attention import DeformableAttention, Grid, centres
from vision_ttt.layers import DepthwiseConv2d
from vision_ttt.layers.conv_stem import ConvNorm
from vision_ttt.layers.norm_precision import normalised
from vision_ttt.models.block_sequence import run_block


class Layout(NamedTuple):
    """Where the tokens lie: the backbone's on one grid, the pyramid's on one per level."""

    grid: Grid
    """(h, w) of the T tokens of the backbone."""
    levels: tuple[Grid, ...]
    """(h, w) of each level of the pyramid, finest first; S tokens in total."""
    grid_places: Tensor
    """[T, 2], centres of the backbone's tokens in the image, (x, y) in 0…1."""
    level_places: Tensor
    """[S, 2], those of the pyramid's tokens."""

    @classmethod
    def of(cls, grid: Grid, levels: tuple[Grid, ...], like: Tensor) -> Layout:
        """The layout of these grids, on the device of ``like``."""
        places = torch.cat([centres(level, like=like) for level in levels])
        return cls(grid, levels, centres(grid, like=like), places)


class SpatialPrior(nn.Module):
    """Images [B, C, H, W] → tokens [B, h · w, D] at strides 4, 8, 16, 32 (ViT-Adapter, Sec. 3.3).

    A stem of three 3×3 convolutions, the first of stride 2, and a 3×3 max-pooling of stride 2, then
    three 3×3 convolutions of stride 2; each with BatchNorm and ReLU. A linear layer per stride
    projects to D channels.

    Args:
        in_chans: C.
        width: channels of the stem; those at strides 8, 16 and 32 are 2, 4 and 4 times it.
        dim: D.

    Initialisation: convolutions and projections normal with variance 2 / fan-out, biases zero.
    """

    def __init__(self, in_chans: int, width: int, dim: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            ConvNorm(in_chans, width, stride=2),
            ConvNorm(width, width),
            ConvNorm(width, width),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        widths = (width, 2 * width, 4 * width, 4 * width)
        self.stages = nn.ModuleList(
            ConvNorm(narrow, wide, stride=2) for narrow, wide in itertools.pairwise(widths)
        )
        self.projections = nn.ModuleList(nn.Linear(channels, dim) for channels in widths)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.out_channels * math.prod(module.kernel_size)
                nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=math.sqrt(2 / dim))
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Four tensors of tokens, finest first; h and w are the image's sides over the stride."""
        # In this format, which a convolution passes on, tokens are a view of a map.
        x = self.stem(images.contiguous(memory_format=torch.channels_last))
        maps = [x]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        return [
            project(x.flatten(2).transpose(1, 2))
            for project, x in zip(self.projections, maps, strict=True)
        ]


class ConvFFN(nn.Module):
    """fc₂ GELU(DWConv3×3(fc₁ x)) of a pyramid's tokens, each level convolved on its own grid.

    Initialisation: projections normal with standard deviation 0.02, the convolution with variance
    2 / 9, biases zero.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.conv = DepthwiseConv2d(hidden)
        self.conv_bias = nn.Parameter(torch.zeros(hidden))
        self.fc2 = nn.Linear(hidden, dim)
        for projection in (self.fc1, self.fc2):
            nn.init.trunc_normal_(projection.weight, std=0.02)
            nn.init.zeros_(projection.bias)
        nn.init.normal_(self.conv.weight, std=math.sqrt(2 / 9))

    def forward(self, x: Tensor, levels: Sequence[Grid]) -> Tensor:
        """x [B, S, D], the tokens of the levels one after the other → [B, S, D]."""
        pieces = self.fc1(x).split([h * w for h, w in levels], dim=1)
        convolved = [self.conv(piece, grid) for piece, grid in zip(pieces, levels, strict=True)]
        return self.fc2(F.gelu(torch.cat(convolved, dim=1) + self.conv_bias))


class Injector(nn.Module):
    """x + γ · attention(LN(x) → LN(c)): the backbone's tokens x read the pyramid c.

    ViT-Adapter, Eq. 1. γ [D] starts at 0, so that a pre-trained backbone starts unchanged. The
    attention has a level for each one of the pyramid.
    """

    def __init__(self, attention: DeformableAttention, dim: int) -> None:
        super().__init__()
        self.query_norm = nn.LayerNorm(dim, eps=1e-6)
        self.value_norm = nn.LayerNorm(dim, eps=1e-6)
        self.attention = attention
        self.gamma = nn.Parameter(torch.zeros(dim))

    def no_weight_decay(self) -> set[str]:
        """γ."""
        return {"gamma"}

    def forward(self, x: Tensor, pyramid: Tensor, layout: Layout) -> Tensor:
        """x [B, T, D], pyramid [B, S, D] → [B, T, D]."""
        read = self.attention(
            normalised(self.query_norm, x),
            layout.grid_places,
            self.value_norm(pyramid),
            layout.levels,
        )
        return x + self.gamma * read


class Extractor(nn.Module):
    """The pyramid c reads the backbone's tokens x, then an FFN (ViT-Adapter, Eq. 2 and 3)::

        c ← c + attention(LN(c) → LN(x))
        c ← c + FFN(LN(c))

    The attention is of one level, the FFN e.g. :class:`ConvFFN`, with stochastic depth.
    """

    def __init__(
        self, attention: DeformableAttention, ffn: nn.Module, dim: int, *, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        self.query_norm = nn.LayerNorm(dim, eps=1e-6)
        self.value_norm = nn.LayerNorm(dim, eps=1e-6)
        self.attention = attention
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.ffn = ffn
        self.drop_path = DropPath(drop_path)

    def forward(self, pyramid: Tensor, x: Tensor, layout: Layout) -> Tensor:
        """pyramid [B, S, D], x [B, T, D] → the pyramid [B, S, D]."""
        pyramid = pyramid + self.attention(
            self.query_norm(pyramid), layout.level_places, self.value_norm(x), (layout.grid,)
        )
        return pyramid + self.drop_path(self.ffn(self.norm(pyramid), layout.levels))


class Interaction(nn.Module):
    """Injection before a group of the backbone's blocks, and after it one or more extractors."""

    def __init__(self, injector: Injector, extractors: Sequence[Extractor]) -> None:
        super().__init__()
        self.injector = injector
        self.extractors = nn.ModuleList(extractors)
        self.grad_checkpointing = False

    def inject(self, x: Tensor, pyramid: Tensor, layout: Layout) -> Tensor:
        """The backbone's tokens [B, T, D] with what the injector reads from the pyramid."""
        return run_block(self.injector, x, pyramid, layout, checkpointing=self.grad_checkpointing)

    def extract(self, pyramid: Tensor, x: Tensor, layout: Layout) -> Tensor:
        """The pyramid's tokens [B, S, D] with what the extractors read from the backbone's."""
        for extractor in self.extractors:
            pyramid = run_block(
                extractor, pyramid, x, layout, checkpointing=self.grad_checkpointing
            )
        return pyramid
