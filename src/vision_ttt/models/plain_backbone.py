"""Plain backbones: patches, blocks of one resolution on tokens [B, T, D], a pooled feature, a head.

Shape letters: B images, C channels, T tokens on a grid (h, w), D width, n class tokens, N = T + n.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from timm.layers import Format, PatchEmbed
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import Tensor, nn

from vision_ttt.layers import ExtraTokens
from vision_ttt.layers.extra_tokens import merge_extra
from vision_ttt.models.arguments import check_sides, choose
from vision_ttt.models.block_sequence import BlockSequence
from vision_ttt.models.classifier import Classifier
from vision_ttt.models.image_size import check_image_size, embed_patches, positions_for
from vision_ttt.models.masked_patches import drop_tokens, mask_tokens
from vision_ttt.models.naflex import NaFlexBatch
from vision_ttt.models.naflex_backbone import embed_naflex, naflex_features, naflex_head
from vision_ttt.models.weight_decay import undecayed_parameters

torch.fx.wrap("check_image_size")
torch.fx.wrap("positions_for")


class PlainBackbone(Classifier):
    """Backbone and classifier whose blocks all run at one resolution: [B, C, H, W] → logits.

    ::

        x = patch_embed(image) (+ pos_embed)         [B, T, D]
        x = class_tokens.insert(x)                   [B, N, D]
        x = block(x, (h, w), positions), each block  [B, N, D]
        logits = head(pool(norm(x)))

    A model is a subclass that constructs the parts and passes them here; the order of construction
    determines the weights drawn from a seed. Blocks are called with the tokens, their grid and, in
    models with class tokens, the positions of these in the sequence.

    Args:
        patch_embed: of :func:`vision_ttt.models.image_size.patch_embedding`.
        blocks: modules (x [B, N, D], grid, positions) → [B, N, D].
        norm: applied to the last block's tokens.
        head: of :func:`vision_ttt.models.classifier.linear_head`.
        pos_embed: of :func:`vision_ttt.models.image_size.position_embedding`, interpolated to other
            grids, or None.
        class_tokens: learned tokens among the image's, e.g. class tokens or registers, or None.
        own_pools: further values of ``global_pool``, which a subclass serves in :meth:`pool`.
        global_pool: "avg" (the mean over image tokens), "max_norm" (the image token of largest
            norm), the placement of the class tokens (their mean), or "" (all tokens).
        dynamic_img_size: accept any image size.
        drop_rate: dropout before the head.
        patch_drop_rate: share of the image tokens that :meth:`forward_features` leaves out in
            training, chosen at random for each image.

    Attributes:
        mask_token: a parameter [1, 1, D] after :meth:`add_mask_token`; None before.

    Raises:
        ValueError: the model does not support this pooling; in forward, an image does not fit.
    """

    keeps_grid = True
    """Whether the blocks need a whole grid of tokens: ``patch_drop_rate`` then leaves out rows and
    columns."""

    def __init__(
        self,
        *,
        patch_embed: PatchEmbed,
        blocks: Iterable[nn.Module],
        norm: nn.Module,
        head: nn.Module,
        pos_embed: nn.Parameter | None = None,
        class_tokens: ExtraTokens | None = None,
        own_pools: tuple[str, ...] = (),
        global_pool: str = "avg",
        dynamic_img_size: bool = False,
        drop_rate: float = 0.0,
        patch_drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim = patch_embed.proj.out_channels
        self.in_chans = patch_embed.proj.in_channels
        self.dynamic_img_size = dynamic_img_size
        self.dynamic_img_pad = patch_embed.dynamic_img_pad
        self.grad_checkpointing = False
        self.patch_drop_rate = patch_drop_rate
        self.register_parameter("mask_token", None)
        # Called alone it returns what timm's ViT has of its own: [B, T, D], or [B, h, w, D].
        patch_embed.flatten, patch_embed.output_fmt = not dynamic_img_size, Format.NHWC
        self.patch_embed = patch_embed
        self.pos_embed = pos_embed
        self.class_tokens = class_tokens
        self.pos_drop, self.norm_pre = nn.Identity(), nn.Identity()
        self.blocks = BlockSequence(blocks)
        self.blocks.own_context = self._own_context()
        self.norm = norm
        reduction = patch_embed.feat_ratio()
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": embed_dim, "reduction": reduction}
            for i in range(len(self.blocks))
        ]
        placements = () if class_tokens is None else (class_tokens.placement,)
        self._add_head(
            head,
            embed_dim,
            pools=(*own_pools, "avg", "max_norm", *placements, ""),
            global_pool=global_pool,
            drop_rate=drop_rate,
        )

    # Attributes of timm's ViT that other libraries read.

    no_embed_class = True
    """``pos_embed`` has no positions of class tokens."""
    reg_token = None
    """Registers are among the ``cls_token``."""

    @property
    def has_class_token(self) -> bool:
        """Whether there are class tokens, wherever they are."""
        return self.class_tokens is not None

    @property
    def num_prefix_tokens(self) -> int:
        """Number of class tokens before the image tokens."""
        tokens = self.class_tokens
        return tokens.count if tokens is not None and tokens.placement == "head" else 0

    @property
    def cls_token(self) -> Tensor | None:
        """The class tokens [1, n, D] that come before the image tokens, or None."""
        return self.class_tokens.prepared() if self.num_prefix_tokens else None

    def _own_context(self) -> tuple[Any, ...] | None:
        """The blocks' context for images of the model's own size; None if no prefix is enough."""
        grid = tuple(self.patch_embed.grid_size)
        if self.class_tokens is None:
            return (grid,)
        if not self.num_prefix_tokens:
            return None
        return grid, self.class_tokens.positions(grid[0] * grid[1])

    # timm's contract

    def no_weight_decay(self) -> set[str]:
        """Positions and the parameters that layers name, class tokens among them."""
        own = {name for name in ("mask_token", "pos_embed") if getattr(self, name) is not None}
        return own | undecayed_parameters(self)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups for layer decay: stem, each block, the final norm."""
        return {
            "stem": r"^pos_embed|^mask_token|^class_tokens|^patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade compute for memory: keep only each block's input for the backward pass."""
        self.grad_checkpointing = enable

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Change the model's image or patch size, interpolating patch weights and positions.

        Raises:
            TypeError, ValueError: the sizes do not fit; the model stays as it is.
        """
        embed = self.patch_embed
        former = tuple(embed.grid_size)
        overlapping = embed.proj.stride != embed.patch_size  # then patch_embed checks the rest
        check_sides(
            embed.img_size if img_size is None else img_size,
            embed.patch_size if patch_size is None else patch_size,
            whole_patches=not (overlapping or self.dynamic_img_size),
            pad=self.dynamic_img_pad,
        )
        self.patch_embed.set_input_size(img_size=img_size, patch_size=patch_size)
        grid = tuple(self.patch_embed.grid_size)
        if self.pos_embed is not None and grid != former:
            resized = positions_for(grid, self.pos_embed.detach(), former)
            self.pos_embed = nn.Parameter(resized, requires_grad=self.pos_embed.requires_grad)
        for info in self.feature_info:
            info["reduction"] = self.patch_embed.feat_ratio()
        if getattr(self.blocks, "own_context", None) is not None:
            self.blocks.own_context = self._own_context()
        update_model_input_size(self, self.patch_embed.img_size, patch_size=patch_size)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove what :meth:`forward_intermediates` with these indices does not need."""
        taken, last = feature_take_indices(len(self.blocks), indices)
        kept = self.blocks[: last + 1]
        kept.own_context = getattr(self.blocks, "own_context", None)
        self.blocks = kept
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return taken

    def add_mask_token(self) -> None:
        """Add the learned token that masked image tokens are replaced by; see :meth:`embed`.

        Initialisation: normal with standard deviation 0.02.
        """
        weight = self.patch_embed.proj.weight
        self.mask_token = nn.Parameter(weight.new_empty(1, 1, self.embed_dim))
        nn.init.trunc_normal_(self.mask_token, std=0.02)

    # forward

    def embed(
        self, x: Tensor | Mapping[str, Any], mask: Tensor | None = None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """The first block's input of images [B, C, H, W], or of a batch of any shapes.

        Args:
            x: images.
            mask: bool [B, T], row by row: where it is True, the mask token takes the place of the
                image token. The position is added to it as to the others.

        Returns:
            Tokens [B, N, D], and the blocks' other arguments: the grid and, in models with class
            tokens, the positions of these in the sequence. Of a batch of any shapes, the tokens of
            all images [1, S, D], and a :class:`vision_ttt.models.naflex.NaFlexBatch`.

        Raises:
            TypeError, ValueError: the images do not fit the model, or the mask does not fit the
                images; there is no mask token; a mask is given for a batch of any shapes.
        """
        self._refuse_tracing()
        if isinstance(x, Mapping):
            if mask is not None:
                raise ValueError("a batch of images of any shapes takes no mask; give images")
            return embed_naflex(self, x)
        dynamic, pad = self.dynamic_img_size, self.dynamic_img_pad
        check_image_size(x, self.patch_embed, self.in_chans, dynamic=dynamic, pad=pad)
        x = embed_patches(x, self.patch_embed, pad=pad)  # [B, h, w, D]
        grid = (x.shape[1], x.shape[2])
        x = x.flatten(1, 2)  # [B, T, D]
        if mask is not None:
            x = mask_tokens(x, mask, self.mask_token)
        return self.place(x, grid)

    def place(self, x: Tensor, grid: tuple[int, int]) -> tuple[Tensor, tuple[Any, ...]]:
        """Patches [B, T, D] of a grid with positions and class tokens; see :meth:`embed`."""
        if self.pos_embed is not None:
            x = x + positions_for(grid, self.pos_embed, self.patch_embed.grid_size)
        if self.class_tokens is None:
            return x, (grid,)
        return self.class_tokens.insert(x), (grid, self.class_tokens.positions(x.shape[1]))

    def run_blocks(
        self, x: Tensor, context: tuple[Any, ...], start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Tokens [B, N, D] after the blocks from ``start`` to before ``stop``.

        Args:
            x: of :meth:`embed` or of the block before ``start``.
            context: of :meth:`embed`.
            start, stop: as in a slice of ``blocks``.
        """
        blocks = self.blocks
        if not isinstance(blocks, BlockSequence):  # a list that took its place
            blocks = BlockSequence(blocks)
        return blocks(x, *context, start=start, stop=stop, checkpointing=self.grad_checkpointing)

    def split_tokens(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [B, N, D] → the image tokens [B, T, D], and the class tokens [B, n, D] or None."""
        return (x, None) if self.class_tokens is None else self.class_tokens.extract(x)

    def join_tokens(self, image: Tensor, others: Tensor | None) -> Tensor:
        """Undo :meth:`split_tokens`."""
        if self.class_tokens is None or others is None:
            return image
        return merge_extra(image, others, self.class_tokens.positions(image.shape[1]))

    def forward_features(
        self, x: Tensor | Mapping[str, Any], mask: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Normalised tokens [B, N, D] of images [B, C, H, W].

        Of a batch of any shapes, a dictionary: "patches" [B, N, D], the image tokens where the
        batch has their patches, 0 at the padding; the batch's own "patch_coord" and "patch_valid";
        in models with class tokens also these, "class_tokens" [B, n, D].

        In training a share ``patch_drop_rate`` of the image tokens is left out before the first
        block. The remaining tokens keep their order, and so do the scans. In models that need a
        grid (``keeps_grid``), whole rows and columns are left out. Convolutions run on the smaller
        grid: tokens that become neighbours in it are convolved as neighbours.

        Args:
            x: images.
            mask: as of :meth:`embed`. It changes neither time nor memory: all T tokens are run.

        Raises:
            ValueError: as :meth:`embed`; or tokens of a batch of any shapes are to be left out.
        """
        x, context = self.embed(x, mask)
        ragged = _is_ragged(context)
        if self.training and self.patch_drop_rate > 0:
            if ragged:
                raise ValueError(
                    f"patch_drop_rate is {self.patch_drop_rate}; with a batch of images of any"
                    " shapes it must be 0: a token that is left out has no place in the result"
                )
            x, context = self._drop_patches(x, context[0])
        x = self.norm(self.run_blocks(x, context))
        return naflex_features(self, x, *context) if ragged else x

    def forward_head(
        self, x: Tensor | Mapping[str, Tensor], pre_logits: bool = False
    ) -> Tensor | dict[str, Tensor]:
        """Logits of :meth:`forward_features`'s result, or with ``pre_logits`` the head's input.

        For ``global_pool=""`` those of each token, for a batch of any shapes as a dictionary.

        Raises:
            ValueError: the dictionary lacks the class tokens of a model that has them.
        """
        if not isinstance(x, Mapping):
            return super().forward_head(x, pre_logits)
        return naflex_head(self, x, pre_logits)

    def _drop_patches(self, x: Tensor, grid: tuple[int, int]) -> tuple[Tensor, tuple[Any, ...]]:
        """Tokens and context of :meth:`embed` without a share of the image tokens."""
        image, others = self.split_tokens(x)
        rate, whole_lines = self.patch_drop_rate, self.keeps_grid
        image, grid = drop_tokens(image, grid, rate, whole_lines=whole_lines)
        if self.class_tokens is None:
            return image, (grid,)
        return self.join_tokens(image, others), (grid, self.class_tokens.positions(image.shape[1]))

    def pool(self, x: Tensor) -> Tensor:
        """The classification feature [B, D] of tokens [B, N, D]; for ``global_pool=""`` x.

        After a norm layer whose weights are all 1, as in a fresh model, the norms of "max_norm" are
        equal, and rounding chooses.
        """
        if self.global_pool == "":
            return x
        image, class_tokens = self.split_tokens(x)
        if self.global_pool == "avg":
            return image.mean(1)
        if self.global_pool == "max_norm":
            strongest = image.float().norm(dim=-1).argmax(1)  # [B]
            return image.take_along_dim(strongest[:, None, None], dim=1).squeeze(1)
        return class_tokens.mean(1)

    def forward_intermediates(
        self,
        x: Tensor | Mapping[str, Any],
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Any] | tuple[Tensor, list[Any]]:
        """Features after chosen blocks, and the final tokens.

        No tokens are dropped: ``patch_drop_rate`` applies to :meth:`forward_features` alone.

        Args:
            x: images [B, C, H, W], or a batch of any shapes.
            indices: which blocks, or how many of the last ones; all by default.
            return_prefix_tokens: pair each feature with the class tokens [B, n, D] of that depth.
            norm: apply the final norm to each feature.
            stop_early: run no block after the last chosen one.
            output_fmt: "NCHW" for maps [B, D, h, w] or "NLC" for tokens [B, T, D].
            intermediates_only: return only the list.

        Of a batch of any shapes, the final tokens are the dictionary of :meth:`forward_features`,
        and features, "NLC" alone, [B, N, D] as its "patches".

        Raises:
            ValueError: output_fmt is unknown, or does not support the images; or
                return_prefix_tokens is set for a model without class tokens.
        """
        choose("output_fmt", output_fmt, ("NCHW", "NLC"))
        if return_prefix_tokens and self.class_tokens is None:
            raise ValueError("return_prefix_tokens: this model has no class tokens")
        taken, last = feature_take_indices(len(self.blocks), indices)
        x, context = self.embed(x)
        ragged = _is_ragged(context)
        if ragged and output_fmt == "NCHW":
            raise ValueError("images of any shapes have no common map: output_fmt must be 'NLC'")
        features: list[Any] = []
        for index in range(last + 1 if stop_early else len(self.blocks)):
            x = self.run_blocks(x, context, index, index + 1)
            if index not in taken:
                continue
            y = self.norm(x) if norm else x
            if ragged:
                both = naflex_features(self, y, *context)
                y, tokens = both["patches"], both.get("class_tokens")
            else:
                y, tokens = self.split_tokens(y)
            if output_fmt == "NCHW":
                y = y.unflatten(1, context[0]).permute(0, 3, 1, 2).contiguous()
            features.append((y, tokens) if return_prefix_tokens else y)
        if intermediates_only:
            return features
        x = self.norm(x)
        return (naflex_features(self, x, *context) if ragged else x), features


def _is_ragged(context: tuple[Any, ...]) -> bool:
    return isinstance(context[0], NaFlexBatch)
