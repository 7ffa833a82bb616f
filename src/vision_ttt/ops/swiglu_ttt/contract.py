"""The contract of swiglu_ttt."""

from typing import NamedTuple

from torch import Tensor

from vision_ttt.ops._contract import Contract


class Inputs(NamedTuple):
    """The op's arguments, shaped as below."""

    q: Tensor
    k: Tensor
    v: Tensor
    w1: Tensor
    w2: Tensor
    w3: Tensor

    def loss_scale(self) -> float:
        """Factor of the summed inner loss: d^-½ / T."""
        return self.k.shape[-1] ** -0.5 / self.k.shape[1]


CONTRACT = Contract(
    "swiglu_ttt",
    {
        **{"q": "B T H d", "k": "B T H d", "v": "B T H d"},
        **{"w1": "H d d", "w2": "H d d", "w3": "H d d"},
    },
    alike=("q", "k", "v"),
    autocast=True,
)
BACKWARD_CONTRACT = CONTRACT.backward({"grad": "B T H d"})
