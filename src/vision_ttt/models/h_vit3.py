"""H-ViT³: ViT³'s blocks in four stages, a hierarchical backbone of linear cost.

Shape letters: B images, C channels, T tokens on a grid (h, w), D width of a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import DropPath, calculate_drop_path_rates, to_2tuple
from timm.models import register_model
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import Tensor, nn

from vision_ttt.layers import ConvMlp, ViT3Block
from vision_ttt.layers.conv_stem import ConvStem, Downsample
from vision_ttt.layers.rotary2d import rotary_table
from vision_ttt.models.arguments import check_arguments, check_sides, choose, mlp_width
from vision_ttt.models.block_sequence import run_block
from vision_ttt.models.building import build_model, feature_cfg, pretrained_cfg
from vision_ttt.models.classifier import Classifier, linear_head
from vision_ttt.models.image_size import check_images
from vision_ttt.models.packaged_weights import family_cfgs
from vision_ttt.models.weight_decay import undecayed_parameters
from vision_ttt.ops._backend import is_transformed

torch.fx.wrap("check_images")
torch.fx.wrap("rotary_table")


class HViT3Stage(nn.Module):
    """Blocks of one resolution: maps [B, dim, h, w] of the stage before → [B, out_dim, h', w'].

    Args:
        dim: input channels; None for the first stage, which keeps the resolution.
        out_dim: D.
        num_heads: heads of each block.
        mlp_ratio: hidden width of the MLPs over D.
        drop_path_rates: stochastic depth, one rate per block.
    """

    def __init__(
        self,
        dim: int | None,
        out_dim: int,
        num_heads: int,
        mlp_ratio: float,
        drop_path_rates: Sequence[float],
    ) -> None:
        super().__init__()
        self.grad_checkpointing = False
        self.downsample = nn.Identity() if dim is None else Downsample(dim, out_dim)
        self.blocks = nn.ModuleList(
            ViT3Block(
                out_dim,
                num_heads,
                mlp=ConvMlp(out_dim, mlp_width(out_dim, mlp_ratio)),
                norm_eps=1e-5,
                drop_path=DropPath(rate),
            )
            for rate in drop_path_rates
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x).permute(0, 2, 3, 1)  # [B, h, w, D]
        grid = (x.shape[1], x.shape[2])
        rotations = rotary_table(grid, x.shape[-1], x.device)
        x = x.flatten(1, 2)
        for block in self.blocks:
            x = run_block(block, x, grid, rotations, checkpointing=self.grad_checkpointing)
        return x.unflatten(1, grid).permute(0, 3, 1, 2)


class HViT3(Classifier):
    """H-ViT³ backbone and classifier: images [B, C, H, W] → logits [B, num_classes].

    A convolutional stem, four stages at 1/4, 1/8, 1/16 and 1/32 of the resolution (sides rounded
    up), BatchNorm, the mean of the tokens and a linear head (ViT³, supplement, Sec. 3 and Table 2).
    Queries and keys carry 2-D RoPE, MLPs a convolution. No weight depends on the image size.

    Args:
        img_size, num_classes, in_chans, drop_rate, drop_path_rate: see
            :class:`vision_ttt.models.Vittt`.
        dims: D of each stage.
        depths: blocks of each stage.
        num_heads: heads of each stage's gated linear units.
        mlp_ratio: hidden width of the MLPs over D.
        global_pool: "avg" (published); "" applies the head to each cell of the map.
        dynamic_img_size: accept any image size; otherwise only ``img_size``.

    Initialisation: as :class:`vision_ttt.models.ViT3`.

    Raises:
        ValueError: an argument is out of its range; in forward, an image does not fit.
        TypeError: an argument is of another type.
    """

    output_fmt = "NHWC"
    maps_need_norms = True
    """The stages' maps are sums that no norm follows; detectors and segmenters add norms."""

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        num_classes: int = 1000,
        dims: Sequence[int] = (64, 128, 320, 512),
        depths: Sequence[int] = (1, 3, 9, 4),
        num_heads: Sequence[int] = (2, 4, 10, 16),
        mlp_ratio: float = 4.0,
        in_chans: int = 3,
        global_pool: str = "avg",
        dynamic_img_size: bool = True,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        if not len(dims) == len(depths) == len(num_heads) > 0:
            raise ValueError(
                "dims, depths and num_heads need one entry for each stage, got "
                f"{list(dims)}, {list(depths)} and {list(num_heads)}"
            )
        for dim, depth, heads in zip(dims, depths, num_heads, strict=True):
            check_arguments(embed_dim=dim, depth=depth, num_heads=heads)
        check_arguments(
            in_chans=in_chans,
            num_classes=num_classes,
            dynamic_img_size=dynamic_img_size,
            drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
        )
        check_sides(img_size)
        super().__init__()
        self._add_head(
            linear_head(dims[-1], num_classes),
            dims[-1],
            global_pool=global_pool,
            drop_rate=drop_rate,
        )
        self.img_size = to_2tuple(img_size)
        self.in_chans = in_chans
        self.dynamic_img_size = dynamic_img_size
        self.stem = ConvStem(in_chans, dims[0])
        self.stages = nn.ModuleList(
            HViT3Stage(dim, out_dim, heads, mlp_ratio, rates)
            for dim, out_dim, heads, rates in zip(
                (None, *dims),
                dims,
                num_heads,
                calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True),
                strict=False,
            )
        )
        self.norm = nn.BatchNorm2d(dims[-1])
        self.feature_info = [
            {"module": f"stages.{i}", "num_chs": dim, "reduction": 4 * 2**i}
            for i, dim in enumerate(dims)
        ]

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks of all stages, in the order in which they run."""
        return [block for stage in self.stages for block in stage.blocks]

    # timm's contract

    def no_weight_decay(self) -> set[str]:
        """The inner models' initial states (vectors and biases go anyway)."""
        return undecayed_parameters(self)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups for layer decay: stem, each block or with ``coarse`` each stage, norm."""
        if coarse:
            blocks = [(r"^stages\.(\d+)", None)]
        else:  # a stage's downsampling is in the group of its first block
            blocks = [
                (r"^stages\.(\d+)\.downsample", (0,)),
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            ]
        return {"stem": r"^stem", "blocks": [*blocks, (r"^norm", (99999,))]}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade compute for memory: keep only each block's input for the backward pass."""
        for stage in self.stages:
            stage.grad_checkpointing = enable

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Change the model's image size; no weight depends on it."""
        check_sides(img_size)
        self.img_size = to_2tuple(img_size)
        update_model_input_size(self, self.img_size)

    # forward

    def _embed(self, x: Tensor) -> Tensor:
        """Maps [B, D, h, w] of images, channels last in memory: as tokens they need no copy."""
        self._refuse_tracing()
        check_images(x, self.in_chans, None if self.dynamic_img_size else self.img_size)
        if not is_transformed():  # vmap does not support memory formats
            x = x.contiguous(memory_format=torch.channels_last)
        return self.stem(x)

    def forward_features(self, x: Tensor) -> Tensor:
        """Normalised map [B, h, w, D] of images [B, C, H, W]."""
        x = self._embed(x)
        for stage in self.stages:
            x = stage(x)
        return self.norm(x).permute(0, 2, 3, 1)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Maps after chosen stages, and the final one [B, h, w, D].

        Args:
            x: images [B, C, H, W].
            indices: which stages, or how many of the last ones; all by default.
            norm: apply the final norm to the last stage's map; the others have none.
            stop_early: run no stage after the last chosen one; its map, without the norm, is then
                the final one.
            output_fmt: "NCHW" for maps [B, D, h, w] or "NHWC" for [B, h, w, D].
            intermediates_only: return only the list.

        Raises:
            ValueError: an unknown output_fmt.
        """
        choose("output_fmt", output_fmt, ("NCHW", "NHWC"))
        taken, last = feature_take_indices(len(self.stages), indices)
        stages = self.stages[: last + 1] if stop_early else self.stages
        x = self._embed(x)
        features = []
        for index, stage in enumerate(stages):
            x = stage(x)
            if index in taken:
                y = self.norm(x) if norm and stage is self.stages[-1] else x
                if output_fmt == "NCHW":
                    features.append(y.contiguous())
                else:
                    features.append(y.permute(0, 2, 3, 1))
        if intermediates_only:
            return features
        if len(stages) == len(self.stages):
            x = self.norm(x)
        return x.permute(0, 2, 3, 1), features

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove what :meth:`forward_intermediates` with these indices does not need."""
        taken, last = feature_take_indices(len(self.stages), indices)
        if prune_norm or last + 1 < len(self.stages):  # the norm applies to the last stage alone
            self.norm = nn.Identity()
        self.stages = self.stages[: last + 1]
        self.num_features = self.head_hidden_size = self.feature_info[last]["num_chs"]
        if prune_head:
            self.reset_classifier(0)
        return taken


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"dims": (64, 128, 320, 512), "depths": (1, 3, 9, 4), "num_heads": (2, 4, 10, 16)},
    "small": {"dims": (64, 128, 320, 512), "depths": (2, 6, 18, 8), "num_heads": (2, 4, 10, 16)},
    "base": {"dims": (96, 192, 448, 640), "depths": (2, 6, 18, 8), "num_heads": (3, 6, 14, 20)},
}

_CFG = pretrained_cfg(224, fixed=False, first_conv="stem.0.conv", pool_size=(7, 7))

default_cfgs = family_cfgs({f"hvit3_{size}": _CFG for size in SIZES})


def _create(size: str, pretrained: bool, **kwargs: Any) -> HViT3:
    """Build an H-ViT³ of a size in ``SIZES`` through timm; a wrong keyword raises TypeError."""
    arguments = {**SIZES[size], **kwargs}
    return build_model(
        HViT3,
        f"hvit3_{size}",
        pretrained,
        feature_cfg=feature_cfg(len(arguments["dims"]), most=4),
        **arguments,
    )


@register_model
def hvit3_tiny(pretrained: bool = False, **kwargs: Any) -> HViT3:
    """H-ViT³-T: 29M parameters, 4.9G MACs, 84.0 % on ImageNet-1K (the authors' figure)."""
    return _create("tiny", pretrained, **kwargs)


@register_model
def hvit3_small(pretrained: bool = False, **kwargs: Any) -> HViT3:
    """H-ViT³-S: 54M parameters, 8.8G MACs, 84.9 % on ImageNet-1K (the authors' figure)."""
    return _create("small", pretrained, **kwargs)


@register_model
def hvit3_base(pretrained: bool = False, **kwargs: Any) -> HViT3:
    """H-ViT³-B: 94M parameters, 16.7G MACs, 85.5 % on ImageNet-1K (the authors' figure)."""
    return _create("base", pretrained, **kwargs)
