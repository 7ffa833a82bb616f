"""A linear layer that trains by this package's matrix products."""

from __future__ import annotations

from torch import Tensor, nn

from vision_ttt.layers.fusable import Fusable
from vision_ttt.ops import linear

FEWEST_ROWS = 128
"""Rows from which on packing the weight at each call costs less than it saves."""


class Linear(nn.Linear, Fusable):
    """``nn.Linear`` by :func:`vision_ttt.ops.linear`: [..., in_features] → [..., out_features].

    Parameters and results are those of ``nn.Linear``, but for rounding. Calls of few rows, such as
    decoding's, run PyTorch's function. So do all with ``fused`` set to False. Hooks run, and the
    layer can be wrapped or replaced, as any ``nn.Linear``.
    """

    fused_parts = ()  # it has no parts that could be left out

    @classmethod
    def of(cls, layer: nn.Linear) -> Linear:
        """The layer with the parameters of another one, which are not copied."""
        fused = cls(
            layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta"
        )
        fused.weight, fused.bias = layer.weight, layer.bias
        fused.switch_on()
        return fused

    def forward(self, x: Tensor) -> Tensor:
        if self.fused and x.numel() >= FEWEST_ROWS * self.in_features:
            return linear(x, self.weight, self.bias)
        return super().forward(x)

    def extra_repr(self) -> str:
        switch = Fusable.extra_repr(self)
        return f"{super().extra_repr()}{', ' if switch else ''}{switch}"


def fuse_linear(model: nn.Module) -> None:
    """Replace every ``nn.Linear`` of a model by :class:`Linear`, subclasses excepted.

    For constructors: hooks on the replaced layers are lost.
    """
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(name, Linear.of(module))
