"""Mamba in both directions whose training runs by a composite op."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from vision_ttt.acceleration.supported_parts import has_global_hooks, is_plain, require
from vision_ttt.layers import BidirectionalMamba, DirectionalConv1d
from vision_ttt.layers.ragged_grids import RaggedGrids, each_image
from vision_ttt.ops import fused_mamba


class CompositeMamba(BidirectionalMamba):
    """:class:`BidirectionalMamba` with all between its projections as one op.

    The op is :func:`vision_ttt.ops.fused_mamba`. A call with lengths, or of a layer with a changed
    part, runs the parts.
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
        grids: RaggedGrids | None = None,
    ) -> Tensor:
        """As :meth:`BidirectionalMamba.forward`."""
        given = state is not None or return_state or lengths is not None
        if given or not self._trains_by_op():
            return super().forward(x, state, return_state, lengths, grids)
        mix = partial(
            fused_mamba,
            conv=(self.conv.weight, self.conv.bias),
            x_proj=self.x_proj,
            dt=(self.dt_proj, self.dt_bias),
            A=-torch.exp(self.A_log),
            D=self.D,
        )
        return self.out_proj(each_image(mix, self.in_proj(x), grids))  # [B, T, E] between them

    def _trains_by_op(self) -> bool:
        return self.training and is_plain(self.conv, DirectionalConv1d) and not has_global_hooks()
