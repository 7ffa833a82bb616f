"""The parts of a Vittt block that train with composite ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.layers import DropPath
from torch import Tensor, nn

from vision_ttt.acceleration.composite_linear import LINEAR
from vision_ttt.acceleration.supported_parts import (
    UnsupportedPart,
    has_global_hooks,
    is_plain,
    require,
    require_affine,
)
from vision_ttt.layers import (
    DirectionalConv1d,
    GatedNorm,
    LinearLearner,
    SwiGLU,
    TTTLayerState,
    TTTLinear,
    VitttBlock,
)
from vision_ttt.ops import fused_ttt_linear, swiglu_mlp


class CompositeTTTLinear(TTTLinear):
    """:class:`TTTLinear` that computes all between its projections by one op in training.

    The op is :func:`vision_ttt.ops.fused_ttt_linear`. The layer runs its parts one by one if the
    call has a state or lengths, or if a part was changed.
    """

    plain = TTTLinear

    @staticmethod
    def require_support(layer: TTTLinear) -> None:
        """Raise :class:`UnsupportedPart` where the layer has no composite form."""
        require(layer, "it", TTTLinear)
        for path in ("conv_q", "conv_k"):
            require(layer.get_submodule(path), path, DirectionalConv1d)
        require(layer.learner, "learner", LinearLearner)
        require(layer.merge, "merge", GatedNorm)
        if layer.rotary is not None:
            raise UnsupportedPart("it rotates q and k")
        if layer.rate_proj is None or layer.learner.norm_weight is None:
            raise UnsupportedPart("its rates are not learned, or its inner models have no norm")

    def forward(
        self,
        x: Tensor,
        state: TTTLayerState | None = None,
        return_state: bool = False,
        lengths: Tensor | None = None,
        **attention: Any,
    ) -> Tensor | tuple[Tensor, TTTLayerState]:
        """As :meth:`TTTLinear.forward`."""
        self._check_attention(**attention)
        given = return_state or state is not None or lengths is not None
        if given or not self._trains_by_op():
            return super().forward(x, state, return_state, lengths)
        conv_q, conv_k, learner, merge = self.conv_q, self.conv_k, self.learner, self.merge
        mixed = fused_ttt_linear(
            self.in_proj(x),  # [B, T, C]
            self.rate_proj(x),  # [B, T, H]
            (conv_q.weight, conv_q.bias),
            (conv_k.weight, conv_k.bias),
            learner.state(),
            (learner.norm_weight, learner.norm_bias),
            learner.position_scale(),
            (merge.weight, merge.bias),
            widths=list(self.widths.values()),
            mini_batch_size=learner.mini_batch_size,
            reverse_heads=learner.reverse_heads,
            base_learning_rate=self.base_learning_rate,
            inner_eps=learner.eps,
            post_eps=merge.eps,
        )  # [B, T, D]
        return self.out_proj(mixed)

    def _trains_by_op(self) -> bool:
        return (
            self.training
            and is_plain(self.conv_q, DirectionalConv1d)
            and is_plain(self.conv_k, DirectionalConv1d)
            and is_plain(self.learner, LinearLearner)
            and is_plain(self.merge, GatedNorm)
            and self.rotary is None
            and "views" not in vars(self)
            and "rates" not in vars(self)
            and not has_global_hooks()
        )


class CompositeVitttBlock(VitttBlock):
    """:class:`VitttBlock` whose norm, MLP and residual run as :func:`vision_ttt.ops.swiglu_mlp`.

    A block with a changed part runs the parts.
    """

    plain = VitttBlock

    @staticmethod
    def require_support(block: VitttBlock) -> None:
        """Raise :class:`UnsupportedPart` where the block has no composite form."""
        require(block, "it", VitttBlock)
        require_affine(block.norm, "norm")
        require(block.mlp, "mlp", SwiGLU)
        for path in ("mlp.fc1", "mlp.fc2"):
            require(block.get_submodule(path), path, *LINEAR)

    def forward(self, y: Tensor, grid: tuple[int, int], extra: Sequence[int] = ()) -> Tensor:
        norm, mlp, drop_path = self.norm, self.mlp, self.drop_path
        if not self._trains_by_op():
            return super().forward(y, grid, extra)
        y = self.mixer(y, grid, extra)  # [B, T, D]
        drops = not is_plain(drop_path, nn.Identity, DropPath) or getattr(drop_path, "drop_prob", 0)
        branch = swiglu_mlp(
            y,
            mlp.fc1.weight,
            mlp.fc2.weight,
            norm=(norm.weight, norm.bias),
            residual=not drops,
            eps=norm.eps,
        )
        return y + drop_path(branch) if drops else branch

    def _trains_by_op(self) -> bool:
        fc1, fc2 = self.mlp.fc1, self.mlp.fc2
        return (
            self.training
            and is_plain(self.norm, nn.LayerNorm)
            and is_plain(self.mlp, SwiGLU)
            and is_plain(fc1, *LINEAR)
            and is_plain(fc2, *LINEAR)
            and self.norm.bias is not None
            and fc1.bias is None
            and fc2.bias is None
            and not has_global_hooks()
        )
