"""Bidirectional Mamba that trains with a composite op."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.acceleration.supported_parts import has_global_hooks, is_plain, require
from vision_ttt.layers import BidirectionalMamba, DirectionalConv1d
from vision_ttt.ops import fused_mamba


class CompositeMamba(BidirectionalMamba):
    """:class:`BidirectionalMamba` that computes all between its projections by one op in training.

    The op is :func:`vision_ttt.ops.fused_mamba`. The layer runs its parts one by one if the call
    has ``lengths``, or if a part was changed.
    """

    plain = BidirectionalMamba

    @staticmethod
    def require_support(layer: BidirectionalMamba) -> None:
        """Raise :class:`UnsupportedPart` where the layer has no composite form."""
        require(layer, "it", BidirectionalMamba)
        require(layer.conv, "conv", DirectionalConv1d)

    def forward(
        self,
        x: Tensor,
        state: object = None,
        return_state: bool = False,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """As :meth:`BidirectionalMamba.forward`."""
        given = state is not None or return_state or lengths is not None
        if given or not self._trains_by_op():
            return super().forward(x, state, return_state, lengths)
        mixed = fused_mamba(
            self.in_proj(x),  # [B, T, 2 E]
            (self.conv.weight, self.conv.bias),
            self.x_proj,
            (self.dt_proj, self.dt_bias),
            -torch.exp(self.A_log),
            self.D,
        )  # [B, T, E]
        return self.out_proj(mixed)

    def _trains_by_op(self) -> bool:
        return self.training and is_plain(self.conv, DirectionalConv1d) and not has_global_hooks()
