"""The contract of residual_conv2d_norm."""

from typing import Any, NamedTuple

from torch import Tensor

from vision_ttt.ops._contract import Contract, Real, Whole


class Inputs(NamedTuple):
    """The op's arguments, shaped as below."""

    x: Tensor
    weight: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    height: int
    width: int
    eps: float

    @property
    def grid(self) -> tuple[int, int]:
        """(h, w)."""
        return self.height, self.width


_TOKENS = "B height*width C"
_TENSORS = {"x": _TOKENS, "weight": "C 1 K K", "norm_weight": "C", "norm_bias": "C"}
_NUMBERS: dict[str, Any] = {"height": Whole(1), "width": Whole(1), "eps": Real(0)}

CONTRACT = Contract("residual_conv2d_norm", _TENSORS, _NUMBERS, odd=("K",))
BACKWARD_CONTRACT = CONTRACT.preceded_by(grad_y=_TOKENS, grad_normed=_TOKENS)
