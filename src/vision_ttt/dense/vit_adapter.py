"""ViT-Adapter: maps of four resolutions from a plain backbone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.dense.deformable_attention import DeformableAttention, Grid
from vision_ttt.dense.interaction import (
    ConvFFN,
    Extractor,
    Injector,
    Interaction,
    Layout,
    SpatialPrior,
)
from vision_ttt.dense.plain_encoder import STRIDES, as_encoder, block_groups, headless
from vision_ttt.models.arguments import mlp_width
from vision_ttt.models.image_size import check_images
from vision_ttt.models.weight_decay import undecayed_parameters

_EXTRA_EXTRACTORS = 2
"""Extractors of the last interaction in addition to its first."""

_WIDEST_OF_SIX_HEADS = 384
"""D of Vittt-S. Up to it, the published adapters have 6 heads and values of D channels; above, 12
and D / 2, for D = 1024 with 16 heads."""


class ViTAdapter(nn.Module):
    """Images [B, C, H, W] → maps [B, D, ⌈H / s⌉, ⌈W / s⌉], s = 4, 8, 16, 32 (ViT-Adapter, Fig. 4).

    A spatial prior makes a pyramid of the image. The plain backbone's blocks run in four groups;
    before each an injector adds to the backbone's tokens what they read from the pyramid (strides
    8, 16 and 32), after it an extractor adds to the pyramid what it reads from the tokens, both by
    deformable attention::

        maps_4 = BatchNorm(c_4 + up(c_8) + y_1)         c_s of the spatial prior and the extractors,
        maps_s = BatchNorm(c_s + y_i), s = 8, 16, 32    y_i the tokens after group i, interpolated

    Any image size is accepted: images are padded with zeros, right and bottom, to whole cells of
    stride 32 and whole patches, and the maps are cropped. Class tokens and registers take part in
    the blocks only.

    Args:
        backbone: the name of a plain model, built with random weights, or the model itself, made
            with ``dynamic_img_size=True``. It becomes ``backbone``, and its final norm and head are
            removed.
        conv_width: channels of the spatial prior's stem.
        points: places that a head of a query reads per level.
        mlp_ratio: hidden width of the extractors' FFN over D.
        heads: heads of the deformable attention; by default 6 up to D = 384, 12 above, and 16
            from D = 1024.
        ratio: channels of its values over D; by default 1 up to D = 384, 0.5 above.
        interactions: index of the last block of each of the four groups, e.g. (2, 5, 8, 11); by
            default the blocks are divided evenly.
        drop_path: stochastic depth of the extractors' FFNs.

    Attributes:
        channels: (D, D, D, D), of the maps.
        strides: (4, 8, 16, 32).

    Raises:
        RuntimeError: no model has the backbone's name.
        TypeError: the backbone is not plain.
        ValueError: an argument is out of its range, or the backbone accepts one image size only; in
            forward, images have other channels than the backbone's.
    """

    def __init__(
        self,
        backbone: str | nn.Module,
        *,
        conv_width: int = 64,
        points: int = 4,
        mlp_ratio: float = 0.25,
        heads: int | None = None,
        ratio: float | None = None,
        interactions: Sequence[int] | None = None,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.backbone = headless(backbone)
        dim = self.backbone.embed_dim
        wide = dim > _WIDEST_OF_SIX_HEADS
        heads = (6 if not wide else 12 if dim < 1024 else 16) if heads is None else heads
        ratio = (0.5 if wide else 1.0) if ratio is None else ratio
        for name, value in (("conv_width", conv_width), ("points", points), ("heads", heads)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= drop_path < 1:
            raise ValueError(f"drop_path must be in 0 to below 1, got {drop_path}")
        self.groups = block_groups(len(self.backbone.blocks), interactions)
        self.channels = (dim,) * len(STRIDES)
        self.strides = STRIDES

        self.in_chans = self.backbone.patch_embed.proj.in_channels
        patch = self.backbone.patch_embed.patch_size
        self.patch_size = patch
        self.unit = tuple(math.lcm(side, STRIDES[-1]) for side in patch)

        def attention(levels: int) -> DeformableAttention:
            return DeformableAttention(dim, heads=heads, levels=levels, points=points, ratio=ratio)

        def extractor() -> Extractor:
            ffn = ConvFFN(dim, mlp_width(dim, mlp_ratio))
            return Extractor(attention(1), ffn, dim, drop_path=drop_path)

        coarse = len(STRIDES) - 1
        last = len(self.groups) - 1
        self.prior = SpatialPrior(self.in_chans, conv_width, dim)
        self.level_embed = nn.Parameter(nn.init.normal_(torch.empty(coarse, dim)))
        self.interactions = nn.ModuleList(
            Interaction(
                Injector(attention(coarse), dim),
                [extractor() for _ in range(1 + (_EXTRA_EXTRACTORS if index == last else 0))],
            )
            for index in range(len(self.groups))
        )
        self.up = nn.ConvTranspose2d(dim, dim, 2, stride=2)
        nn.init.normal_(self.up.weight, std=math.sqrt(2 / (4 * dim)))
        nn.init.zeros_(self.up.bias)
        self.norms = nn.ModuleList(nn.BatchNorm2d(dim) for _ in STRIDES)

    def no_weight_decay(self) -> set[str]:
        """The backbone's names, the level embedding and the injectors' γ."""
        return {"level_embed", *undecayed_parameters(self)}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade compute for memory: keep only the inputs of blocks, injectors and extractors."""
        self.backbone.set_grad_checkpointing(enable)
        for interaction in self.interactions:
            interaction.grad_checkpointing = enable

    def forward(self, images: Tensor) -> list[Tensor]:
        """Four maps, finest first."""
        height, width = check_images(images, self.in_chans, None)
        images = F.pad(images, (0, -width % self.unit[1], 0, -height % self.unit[0]))
        rows, columns = images.shape[2:]
        grids = [(rows // stride, columns // stride) for stride in STRIDES]
        grid = (rows // self.patch_size[0], columns // self.patch_size[1])
        layout = Layout.of(grid, tuple(grids[1:]), images)

        finest, *levels = self.prior(images)
        pyramid = torch.cat([c + e for c, e in zip(levels, self.level_embed, strict=True)], dim=1)
        pyramid, groups = self._interact(images, pyramid, layout)

        levels = pyramid.split([h * w for h, w in grids[1:]], dim=1)
        c = [_as_map(x, own) for x, own in zip((finest, *levels), grids, strict=True)]
        c[0] = self.up(c[1]).add_(c[0])  # in place: a new tensor of this size costs more
        maps = []
        for x, y, norm, own, stride in zip(c, groups, self.norms, grids, STRIDES, strict=True):
            y = F.interpolate(_as_map(y, grid), size=own, mode="bilinear", align_corners=False)
            maps.append(norm(y.add_(x))[:, :, : -(-height // stride), : -(-width // stride)])
        return maps

    def _interact(
        self, images: Tensor, pyramid: Tensor, layout: Layout
    ) -> tuple[Tensor, list[Tensor]]:
        """The pyramid [B, S, D] after all interactions, and image tokens after each group."""
        encoder = as_encoder(self.backbone)
        x, context = encoder.embed(images)
        groups = []
        for interaction, (start, stop) in zip(self.interactions, self.groups, strict=True):
            image, others = encoder.split_tokens(x)
            x = encoder.join_tokens(interaction.inject(image, pyramid, layout), others)
            x = encoder.run_blocks(x, context, start, stop)
            image, _ = encoder.split_tokens(x)
            pyramid = interaction.extract(pyramid, image, layout)
            groups.append(image)
        return pyramid, groups


def _as_map(x: Tensor, grid: Grid) -> Tensor:
    """Tokens [B, h · w, D] as a map [B, D, h, w], a view."""
    return x.unflatten(1, grid).permute(0, 3, 1, 2)
