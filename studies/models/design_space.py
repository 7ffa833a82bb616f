"""ViT³'s backbone around any inner training: the design space of TTT as arguments of a model."""

from __future__ import annotations

from dataclasses import replace

import torch
from timm.layers import DropPath, calculate_drop_path_rates
from torch import Tensor, nn

from vision_ttt.inner import (
    LOSSES,
    MLP,
    DepthwiseConv3x3,
    GatedLinearUnit,
    InnerModel,
    Learner,
    Linear,
    SimplifiedGLU,
    mse,
)
from vision_ttt.layers import Mlp, ResidualConv2d, ViT3Block, ViT3TTT
from vision_ttt.models.arguments import check_arguments, check_sides, choose, mlp_width
from vision_ttt.models.classifier import linear_head
from vision_ttt.models.family import Family
from vision_ttt.models.image_size import patch_embedding, position_embedding
from vision_ttt.models.plain_backbone import PlainBackbone
from vision_ttt.ops import ttt_linear

PUBLISHED = "vit3"
"""The inner model of ViT³ itself: gated units and one convolution, soft clipping, closed form."""

INNER_MODELS = ("linear", "mlp", "gated_linear_unit", "simplified_glu", "depthwise_conv3x3")
"""Inner models of :mod:`vision_ttt.inner`, trained by its generic learner."""


MLP_RATIOS = {"mlp": 2, "gated_linear_unit": 1}
"""Inner models with a hidden layer → its default width, in widths of a head."""

_LARGEST_RATIO = 64


def _inner_model(name: str, grid: tuple[int, int], mlp_ratio: int | None) -> InnerModel:
    if name == "depthwise_conv3x3":
        return DepthwiseConv3x3(grid)
    if name in MLP_RATIOS:
        model = MLP if name == "mlp" else GatedLinearUnit
        return model(widening=MLP_RATIOS[name] if mlp_ratio is None else mlp_ratio)
    return {"linear": Linear, "simplified_glu": SimplifiedGLU}[name]()


def _check_mlp_ratio(mlp_ratio: int | None, inner_model: str) -> None:
    if mlp_ratio is None:
        return
    if inner_model not in MLP_RATIOS:
        raise ValueError(
            f"inner_mlp_ratio is {mlp_ratio!r}, and inner_model {inner_model!r} has no hidden "
            f"layer; accepted: None, or one of {list(MLP_RATIOS)}"
        )
    if isinstance(mlp_ratio, bool) or not isinstance(mlp_ratio, int):
        raise TypeError(f"inner_mlp_ratio is {mlp_ratio!r}; accepted: a whole number or None")
    if not 1 <= mlp_ratio <= _LARGEST_RATIO:
        raise ValueError(f"inner_mlp_ratio is {mlp_ratio}; accepted: 1 to {_LARGEST_RATIO}")


class LearnerMixer(nn.Module):
    """Mix image tokens [B, T, D] by any :class:`vision_ttt.inner.Learner`: → [B, T, D]::

        q, k, v = Linear(x)
        out     = Linear(learner(q, k, v))

    as in ViT³, where all tokens have one learning rate. For a causal scan of linear models with the
    loss ``mse`` the op ``ttt_linear`` computes the same: η = α / √d and p_t = 1 / t give the mean
    over the first t tokens of a mini-batch.

    Args:
        dim: D.
        num_heads: H; D is a multiple of it.
        learner: the inner training; its model is an :class:`vision_ttt.inner.InnerModel`.

    Initialisation: projections as in ViT³, the initial state the model's.

    Raises:
        ValueError: dim is not a multiple of num_heads.
    """

    def __init__(self, dim: int, num_heads: int, learner: Learner) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads, got {dim} and {num_heads}")
        self.heads = (num_heads, dim // num_heads)
        self.learner = learner
        self.qkv = nn.Linear(dim, 3 * dim)
        self.state = nn.ParameterDict(learner.model.initial_state(*self.heads))
        self.proj = nn.Linear(dim, dim)
        for projection in (self.qkv, self.proj):
            nn.init.trunc_normal_(projection.weight, std=0.02)
            nn.init.zeros_(projection.bias)

    def no_weight_decay(self) -> set[str]:
        """The initial state."""
        return {f"state.{name}" for name in self.state}

    def forward(
        self, x: Tensor, grid: tuple[int, int] = (0, 0), rotations: Tensor | None = None
    ) -> Tensor:
        """Mix x [B, T, D]; grid and rotations, which a block of ViT³ passes, are ignored."""
        q, k, v = self.qkv(x).unflatten(-1, (3, *self.heads)).unbind(2)  # each [B, T, H, d]
        return self.proj(_learn(self, q, k, v).flatten(2))

    def learn(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Outputs [B, T, H, d] for the queries q, of the states trained on k and v.

        Raises:
            ValueError: torch.export traces a learner that uses torch.func.
        """
        state, learner = dict(self.state.items()), self.learner
        if not (learner.causal and learner.model == Linear() and learner.loss is mse):
            if torch.compiler.is_exporting():
                raise ValueError(
                    "torch.export cannot see through torch.func, by which this model learns; it "
                    "can with inner_model='vit3', or with inner_model='linear', inner_loss='mse' "
                    "and inner_causal=True"
                )
            return learner(q, k, v, state)
        size = learner.mini_batch_size or k.shape[1]
        dtype = torch.promote_types(q.dtype, torch.float32)
        count = torch.arange(1, size + 1, dtype=dtype, device=q.device)
        return ttt_linear(
            *(q, k, v),
            q.new_full(q.shape[:3], learner.learning_rate / k.shape[-1] ** 0.5, dtype=dtype),
            *(state["w"], state["b"]),
            mini_batch_size=size,
            position_scale=1 / count,
        )


@torch.fx.wrap  # torch.func, which the learner uses, does not support the proxies of torch.fx
def _learn(mixer: LearnerMixer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return mixer.learn(q, k, v)


class NoPositionEncoding(nn.Module):
    """The position encoding of a block without one: tokens [B, T, D] → the same tokens."""

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return x


class DesignSpace(PlainBackbone):
    """ViT³'s backbone and classifier with another inner training: [B, C, H, W] → logits.

    By default learned positions replace the blocks' convolutions, so that tokens exchange
    information by the inner training alone.

    Args:
        img_size, patch_size, in_chans, num_classes, embed_dim, depth, num_heads, mlp_ratio,
            global_pool, drop_rate, drop_path_rate: see :class:`vision_ttt.models.ViT3`.
        inner_model: one of ``INNER_MODELS``, trained in every head, or "vit3" for the published
            layer, which the other ``inner_*`` arguments do not change.
        inner_mlp_ratio: width of the hidden layer of "mlp" or "gated_linear_unit", in widths of a
            head; None for 2 and 1. Other inner models have none: of these, fewer heads make a
            larger state.
        inner_loss: a name in :data:`vision_ttt.inner.LOSSES`.
        inner_learning_rate: α; at 0 the initial state is applied untrained.
        inner_mini_batch_size: tokens per inner step; None for all.
        inner_causal: apply to each query the state trained on the tokens up to its own.
        inner_epochs: passes of the inner training over the tokens; 1 if causal.
        convolutions: encode positions by ViT³'s residual convolutions, one a block.

    Initialisation: as :class:`vision_ttt.models.ViT3` and :class:`LearnerMixer`.

    Raises:
        ValueError: an argument is out of its range; in forward, an image does not fit.
        TypeError: an argument is of another type.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 32,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 64,
        depth: int = 2,
        num_heads: int = 2,
        mlp_ratio: float = 4.0,
        inner_model: str = "simplified_glu",
        inner_mlp_ratio: int | None = None,
        inner_loss: str = "dot_product",
        inner_learning_rate: float = 1.0,
        inner_mini_batch_size: int | None = None,
        inner_causal: bool = False,
        inner_epochs: int = 1,
        convolutions: bool = False,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        check_arguments(
            in_chans=in_chans,
            num_classes=num_classes,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
        )
        check_sides(img_size, patch_size)
        choose("inner_model", inner_model, (*INNER_MODELS, PUBLISHED))
        choose("inner_loss", inner_loss, tuple(LOSSES))
        _check_mlp_ratio(inner_mlp_ratio, inner_model)
        head = linear_head(embed_dim, num_classes)
        patch_embed = patch_embedding(img_size, patch_size, in_chans, embed_dim, pad=False)

        def mixer() -> nn.Module:
            if inner_model == PUBLISHED:
                return ViT3TTT(embed_dim, num_heads)
            learner = Learner(
                _inner_model(inner_model, tuple(patch_embed.grid_size), inner_mlp_ratio),
                LOSSES[inner_loss],
                learning_rate=inner_learning_rate,
                mini_batch_size=inner_mini_batch_size,
                causal=inner_causal,
                epochs=inner_epochs,
            )
            return LearnerMixer(embed_dim, num_heads, learner)

        super().__init__(
            head=head,
            patch_embed=patch_embed,
            pos_embed=None if convolutions else position_embedding(patch_embed),
            blocks=[
                ViT3Block(  # random parts in the order in which a seed's weights are drawn
                    embed_dim,
                    mlp=Mlp(embed_dim, mlp_width(embed_dim, mlp_ratio)),
                    cpe=ResidualConv2d(embed_dim) if convolutions else NoPositionEncoding(),
                    mixer=mixer(),
                    drop_path=DropPath(rate),
                )
                for rate in calculate_drop_path_rates(drop_path_rate, depth)
            ],
            norm=nn.LayerNorm(embed_dim, eps=1e-6),
            global_pool=global_pool,
            drop_rate=drop_rate,
        )

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade compute for memory: keep only each inner step's initial state.

        PyTorch's checkpointing of whole blocks does not support torch.func, which the inner
        training uses. The published layer uses none: its blocks are checkpointed as a whole.
        """
        mixers = [block.ttt for block in self.blocks if isinstance(block.ttt, LearnerMixer)]
        for mixer in mixers:
            mixer.learner = replace(mixer.learner, checkpoint=enable)
        super().set_grad_checkpointing(enable and not mixers)

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Change the model's image or patch size, interpolating patch weights and positions."""
        super().set_input_size(img_size, patch_size)
        for block in self.blocks:
            learner = getattr(block.ttt, "learner", None)
            if learner is not None and isinstance(learner.model, DepthwiseConv3x3):
                model = DepthwiseConv3x3(tuple(self.patch_embed.grid_size))
                block.ttt.learner = replace(learner, model=model)


NANO = "design_space_nano_patch4_32"

FAMILY = Family(DesignSpace, {NANO: {}}, __name__, fixed=True)
default_cfgs = FAMILY.default_cfgs

design_space_nano_patch4_32 = FAMILY.entrypoint(
    "design_space_nano_patch4_32",
    "Two blocks of width 64 for 32 × 32 images, to compare ways of inner training.",
)
