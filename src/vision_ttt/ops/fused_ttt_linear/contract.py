"""The contracts of fused_ttt_linear."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from vision_ttt.ops._contract import Contract, Real, Whole


class Inputs(NamedTuple):
    """The op's arguments. The public function accepts some of them in pairs."""

    projected: Tensor
    rate_logits: Tensor
    conv_q_weight: Tensor
    conv_q_bias: Tensor
    conv_k_weight: Tensor
    conv_k_bias: Tensor
    w0: Tensor
    b0: Tensor
    ln_weight: Tensor
    ln_bias: Tensor
    position_scale: Tensor
    post_weight: Tensor
    post_bias: Tensor
    widths: Sequence[int]
    mini_batch_size: int
    reverse_heads: int
    base_learning_rate: float
    inner_eps: float
    post_eps: float


def _check_layer(op: str, values: Mapping[str, Any]) -> None:
    """Raise an error unless the widths and the directions fit one layer."""
    heads, dim = values["b0"].shape
    directions, channels = values["post_weight"].shape
    inner, rows = heads * dim, values["position_scale"].shape[0]
    columns, widths = values["projected"].shape[-1], values["widths"]
    choices = itertools.product((inner,), (0, inner), (inner,), (0, channels))
    if tuple(widths) not in choices or sum(widths) != columns:
        raise ValueError(
            f"{op}: widths must be [{inner}, 0 or {inner}, {inner}, 0 or {channels}], "
            f"{columns} columns together, got {list(widths)}"
        )
    if directions > 2 or directions * channels != inner or heads % rows:
        raise ValueError(
            f"{op}: {heads} heads of {dim} channels need 1 or 2 directions of "
            f"{inner} channels together and a position scale for every head or for neighbours, "
            f"got post_weight {[directions, channels]} and {rows} position scales"
        )


CONTRACT = Contract(
    "fused_ttt_linear",
    {
        "projected": "B T C",
        "rate_logits": "B T H",
        "conv_q_weight": "H*d 1 K",
        "conv_q_bias": "H*d",
        "conv_k_weight": "H*d 1 K",
        "conv_k_bias": "H*d",
        "w0": "H d d",
        "b0": "H d",
        "ln_weight": "H d",
        "ln_bias": "H d",
        "position_scale": "S mini_batch_size",
        "post_weight": "R D",
        "post_bias": "R D",
    },
    {
        "mini_batch_size": Whole(1),
        "reverse_heads": Whole(0, "H"),
        "base_learning_rate": Real(0),
        "inner_eps": Real(0),
        "post_eps": Real(0),
    },
    others=("widths",),
    further=_check_layer,
)
BACKWARD_CONTRACT = CONTRACT.backward(
    {"grad": "B T D"}, {"z": "B T H*d", "kept_w": "N B H d d", "kept_b": "N B H d"}, may_be_0="BN"
)
