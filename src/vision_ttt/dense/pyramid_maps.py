"""Maps of four resolutions from a plain backbone, by resampling the tokens of four depths."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.dense.plain_encoder import STRIDES, as_encoder, block_groups, headless
from vision_ttt.models.image_size import check_images


class PyramidMaps(nn.Module):
    """Images [B, C, H, W] → maps [B, D, ⌈H / s⌉, ⌈W / s⌉], s = 4, 8, 16, 32.

    The image tokens after each of four groups of blocks, from fine to coarse; for patches of 16::

        maps_4  = ConvTranspose(GELU(BatchNorm(ConvTranspose(x_1))))     each 2 × 2 of stride 2
        maps_8  = ConvTranspose(x_2)
        maps_16 = x_3
        maps_32 = MaxPool(x_4)

    Vim's released UperNet has these maps. The parameter counts of Mamba-Reg's Table 5 are those of
    maps that are resampled without weights (``transposed=False``). Images of any size are accepted:
    they are padded with zeros, right and bottom, to whole cells of stride 32, and the maps are
    cropped. Class tokens and registers take part in the blocks only.

    Args:
        backbone: the name of a plain model, built with random weights, or the model itself, made
            with ``dynamic_img_size=True``. Its final norm and head are removed.
        blocks: index of the last block of each of the four groups; by default even groups.
        transposed: enlarge maps by transposed convolutions; otherwise by bilinear interpolation.

    Attributes:
        channels: (D, D, D, D), of the maps.
        strides: (4, 8, 16, 32).

    Initialisation: PyTorch's default.

    Raises:
        RuntimeError: no model has the backbone's name.
        TypeError: the backbone is not plain.
        ValueError: its patches are not squares of 4, 8, 16 or 32 pixels, it accepts one image size
            only, or blocks do not fit it.
    """

    strides = STRIDES

    def __init__(
        self,
        backbone: str | nn.Module,
        *,
        blocks: Sequence[int] | None = None,
        transposed: bool = True,
    ) -> None:
        super().__init__()
        self.backbone = headless(backbone)
        dim, (height, width) = self.backbone.embed_dim, self.backbone.patch_embed.patch_size
        if height != width or height not in STRIDES:
            raise ValueError(
                f"patches are {height} × {width}; a pyramid needs squares of 4, 8, 16 or 32 pixels"
            )
        self.groups = block_groups(len(self.backbone.blocks), blocks)
        self.channels = (dim,) * len(STRIDES)
        self.resample = nn.ModuleList(
            _resampling(dim, round(math.log2(height / stride)), transposed=transposed)
            for stride in STRIDES
        )

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade compute for memory: keep only the inputs of the backbone's blocks."""
        self.backbone.set_grad_checkpointing(enable)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Four maps, finest first.

        Raises:
            ValueError: images are not [B, C, H, W] with the backbone's C.
        """
        height, width = check_images(images, self.backbone.in_chans, None)
        images = F.pad(images, (0, -width % STRIDES[-1], 0, -height % STRIDES[-1]))
        patch = self.backbone.patch_embed.patch_size[0]
        grid = (images.shape[2] // patch, images.shape[3] // patch)
        encoder = as_encoder(self.backbone)
        x, context = encoder.embed(images)
        maps = []
        for resample, (start, stop), stride in zip(
            self.resample, self.groups, STRIDES, strict=True
        ):
            x = encoder.run_blocks(x, context, start, stop)
            image, _ = encoder.split_tokens(x)
            y = resample(image.unflatten(1, grid).permute(0, 3, 1, 2))
            maps.append(y[:, :, : -(-height // stride), : -(-width // stride)])
        return maps


def _resampling(dim: int, doublings: int, *, transposed: bool) -> nn.Module:
    """A map [B, D, h, w] at 2^doublings times its resolution."""
    if doublings <= 0:
        return nn.MaxPool2d(2**-doublings) if doublings else nn.Identity()
    if not transposed:
        return nn.Upsample(scale_factor=2**doublings, mode="bilinear")
    layers: list[nn.Module] = []
    for _ in range(doublings - 1):
        layers += [nn.ConvTranspose2d(dim, dim, 2, stride=2), nn.BatchNorm2d(dim), nn.GELU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(dim, dim, 2, stride=2))
