"""Mamba-Reg: Vim with registers, a plain backbone of bidirectional selective scans."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vision_ttt.layers import ExtraTokens
from vision_ttt.models.arguments import check_arguments, check_sides, choose
from vision_ttt.models.classifier import linear_head
from vision_ttt.models.family import Family
from vision_ttt.models.image_size import position_embedding
from vision_ttt.models.mamba_parts import mamba_blocks, mamba_patches
from vision_ttt.models.plain_backbone import PlainBackbone

DISTRIBUTIONS = {"even": "even", "front": "head", "middle": "middle", "end": "end"}
"""Distribution of the registers → their placement in :data:`vision_ttt.layers.extra_tokens`.

A further one, "none", is a model without registers.
"""


def reduced_width(embed_dim: int, head_reduction: float) -> int:
    """D / r, the width of a register in the feature.

    Raises:
        ValueError: it is not a whole number, or r is not above 0.
        TypeError: r is not a number.
    """
    if isinstance(head_reduction, bool) or not isinstance(head_reduction, int | float):
        raise TypeError(f"head_reduction is {head_reduction!r}; accepted: numbers above 0")
    width = round(embed_dim / head_reduction) if head_reduction > 0 else 0
    if width < 1 or abs(width * head_reduction - embed_dim) > 1e-6 * embed_dim:
        raise ValueError(
            f"head_reduction is {head_reduction}; it must divide embed_dim = {embed_dim} into whole"
            " widths"
        )
    return width


class RegisterNeck(nn.Module):
    """Reduce each register and concatenate them: [B, n, D] → [B, n · D / r] (Mamba-Reg, Sec. 3.3).

    ::

        RMSNorm([W r_1, …, W r_n])      W: D → D / r, without bias

    Args:
        dim: D.
        width: D / r.
        count: n.

    Initialisation: normal with standard deviation 0.02.
    """

    def __init__(self, dim: int, width: int, count: int) -> None:
        super().__init__()
        self.reduce = nn.Linear(dim, width, bias=False)
        self.norm = nn.RMSNorm(count * width, eps=1e-5)
        nn.init.trunc_normal_(self.reduce.weight, std=0.02)

    def forward(self, registers: Tensor) -> Tensor:
        x = self.reduce(registers).flatten(1)
        return self.norm(x.to(self.norm.weight.dtype))  # float32 under autocast


class MambaReg(PlainBackbone):
    """Mamba-Reg backbone and classifier: images [B, C, H, W] → logits [B, num_classes].

    A patch embedding with learned positions, registers with positions of their own among the image
    tokens, ``depth`` blocks :class:`vision_ttt.layers.MambaBlock`, RMSNorm, all registers in one
    feature and a linear head (Mamba-Reg, Sec. 3.3). Cost and memory are linear in the number of
    tokens.

    Args:
        img_size, patch_size, in_chans, num_classes, embed_dim, depth, dynamic_img_pad, drop_rate,
            drop_path_rate, patch_drop_rate: see :class:`vision_ttt.models.Vittt`.
        num_registers: n (Table 6).
        head_reduction: r (Table 6). For 1 the feature is the registers side by side, otherwise
            :class:`RegisterNeck` reduces each of them to D / r first.
        distribution: of the registers (Table 4): "even" (published: ⌊T / (n + 1)⌋ image tokens
            before each), "front", "middle" or "end"; "none": no registers; `num_registers` is
            ignored.
        state: numbers of each channel's state, N.
        global_pool: "registers" (published, the default where there are any), "first" (R1 only of
            Table 4: the first register), their placement ("even", "head", "middle" or "end": the
            mean of the registers), "avg" (the mean of the image tokens, the default without
            registers), "max_norm" (the image token of largest norm), or "" for the tokens.
        dynamic_img_size: accept any image size; the positions of image tokens are interpolated, and
            registers are distributed over the sequence that there is.

    Initialisation: as :class:`vision_ttt.models.Vim`.

    Attributes:
        num_features: D, of the tokens.
        head_hidden_size: of the feature, n · D / r for "registers" and D otherwise.

    Raises:
        ValueError: an argument is out of its range; in forward, an image does not fit.
        TypeError: an argument is of another type.
    """

    keeps_grid = False

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        depth: int = 24,
        embed_dim: int = 192,
        in_chans: int = 3,
        num_classes: int = 1000,
        num_registers: int = 12,
        head_reduction: float = 1,
        distribution: str = "even",
        state: int = 16,
        global_pool: str | None = None,
        dynamic_img_size: bool = False,
        dynamic_img_pad: bool = False,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        patch_drop_rate: float = 0.0,
    ) -> None:
        check_arguments(
            depth=depth,
            embed_dim=embed_dim,
            in_chans=in_chans,
            num_classes=num_classes,
            num_registers=num_registers,
            state=state,
            dynamic_img_size=dynamic_img_size,
            dynamic_img_pad=dynamic_img_pad,
            drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
            patch_drop_rate=patch_drop_rate,
        )
        check_sides(img_size, patch_size, whole_patches=not dynamic_img_size, pad=dynamic_img_pad)
        choose("distribution", distribution, (*DISTRIBUTIONS, "none"))
        width = reduced_width(embed_dim, head_reduction)
        registers = None
        if distribution != "none":
            registers = ExtraTokens(
                embed_dim, DISTRIBUTIONS[distribution], num_registers, pos_embed=True
            )
        if global_pool is None:
            global_pool = "avg" if registers is None else "registers"
        feature = num_registers * width if global_pool == "registers" else embed_dim
        patch_embed = mamba_patches(img_size, patch_size, in_chans, embed_dim, pad=dynamic_img_pad)
        super().__init__(
            patch_embed=patch_embed,
            pos_embed=position_embedding(patch_embed),
            class_tokens=registers,
            blocks=mamba_blocks(embed_dim, depth, state=state, drop_path_rate=drop_path_rate),
            norm=nn.RMSNorm(embed_dim, eps=1e-5),
            head=linear_head(feature, num_classes),
            own_pools=() if registers is None else ("registers", "first"),
            global_pool=global_pool,
            dynamic_img_size=dynamic_img_size,
            drop_rate=drop_rate,
            patch_drop_rate=patch_drop_rate,
        )
        self.register_width = width
        self._set_neck()

    def _set_neck(self) -> None:
        """Make the part between norm and head, of which only the registers' pooling has one."""
        self.neck, self.head_hidden_size = None, self.embed_dim
        if self.global_pool == "registers":
            count, width = self.class_tokens.count, self.register_width
            self.neck, self.head_hidden_size = nn.Flatten(), count * width
            if width != self.embed_dim:
                weight = self.class_tokens.tokens
                neck = RegisterNeck(self.embed_dim, width, count)
                self.neck = neck.to(weight.device, weight.dtype).train(self.training)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a fresh one, and where ``global_pool`` changes the neck, too.

        On an error the model stays as it is.

        Raises:
            ValueError: the model does not support this pooling, or num_classes is out of its range.
            TypeError: num_classes is no whole number.
        """
        check_arguments(num_classes=num_classes)
        if global_pool not in (None, self.global_pool):
            self.global_pool = choose("global_pool", global_pool, self.pools)
            self._set_neck()
        super().reset_classifier(num_classes)

    def pool(self, x: Tensor) -> Tensor:
        """The classification feature of tokens [B, N, D]; for ``global_pool=""`` x."""
        if self.global_pool not in ("registers", "first"):
            return super().pool(x)
        _, registers = self.class_tokens.extract(x)
        return registers[:, 0] if self.global_pool == "first" else self.neck(registers)


MODELS: dict[str, dict[str, Any]] = {
    "mambar_nano_patch4_32": {
        "embed_dim": 96,
        "depth": 7,
        "num_registers": 4,
        "patch_size": 4,
        "img_size": 32,
    },
    "mambar_tiny_patch16_224": {"embed_dim": 192},
    "mambar_small_patch16_224": {"embed_dim": 384, "head_reduction": 2},
    "mambar_base_patch16_224": {"embed_dim": 768, "head_reduction": 4},
    "mambar_large_patch16_224": {
        "embed_dim": 1024,
        "depth": 48,
        "num_registers": 16,
        "head_reduction": 8,
    },
}

FAMILY = Family(MambaReg, MODELS, __name__, fixed=True)
default_cfgs = FAMILY.default_cfgs

mambar_nano_patch4_32 = FAMILY.entrypoint(
    "mambar_nano_patch4_32",
    "Mamba-Reg for 32 × 32 images and a laptop: 64 image tokens and 4 registers.",
)
mambar_tiny_patch16_224 = FAMILY.entrypoint(
    "mambar_tiny_patch16_224",
    "Mamba-Reg-T: 9M parameters, 77.4 % on ImageNet-1K (the authors' figure).",
)
mambar_small_patch16_224 = FAMILY.entrypoint(
    "mambar_small_patch16_224",
    "Mamba-Reg-S: 28M parameters, 81.4 % on ImageNet-1K (the authors' figure).",
)
mambar_base_patch16_224 = FAMILY.entrypoint(
    "mambar_base_patch16_224",
    "Mamba-Reg-B: 99M parameters, 83.0 % on ImageNet-1K (the authors' figure).",
)
mambar_large_patch16_224 = FAMILY.entrypoint(
    "mambar_large_patch16_224",
    "Mamba-Reg-L: 341M parameters, 83.6 % on ImageNet-1K (the authors' figure).",
)
