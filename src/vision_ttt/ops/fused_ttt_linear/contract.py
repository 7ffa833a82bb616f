"""What fused_ttt_linear asks of its arguments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from vision_ttt.ops._contract import Contract, Real, Whole
from vision_ttt.ops._learner_kernels import DIMENSIONS, LARGEST_MINI_BATCH
from vision_ttt.ops._native import LANES

_TENSORS = {
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
}
_NUMBERS = {
    "mini_batch_size": Whole(1),
    "reverse_heads": Whole(0, "H"),
    "base_learning_rate": Real(0),
    "inner_eps": Real(0),
    "post_eps": Real(0),
}
CONTRACT = Contract("fused_ttt_linear", _TENSORS, _NUMBERS)
BACKWARD_CONTRACT = Contract(
    "fused_ttt_linear_backward",
    {
        "grad": "B T D",
        **_TENSORS,
        "z": "B T H*d",
        "kept_w": "N B H d d",
        "kept_b": "N B H d",
    },
    _NUMBERS,
    may_be_0="BN",
)


def fits(dim: int, channels: int, mini_batch_size: int) -> bool:
    """Whether the kernels take heads of dimension ``dim``, ``channels`` of them per direction."""
    return dim in DIMENSIONS and channels % LANES == 0 and mini_batch_size <= LARGEST_MINI_BATCH


def check(
    contract: Contract, tensors: Sequence[Any], widths: Sequence[int], numbers: Sequence[Any]
) -> None:
    """Raise unless tensors, widths and numbers, in the op's order, are those of one layer.

    Raises:
        TypeError, ValueError: as :meth:`Contract.check`.
    """
    values = dict(zip(contract.names, (*tensors, *numbers), strict=True))
    contract.check(values)
    heads, dim = values["b0"].shape
    directions, channels = values["post_weight"].shape
    inner, rows = heads * dim, values["position_scale"].shape[0]
    columns = values["projected"].shape[-1]
    choices = itertools.product((inner,), (0, inner), (inner,), (0, channels))
    if tuple(widths) not in choices or sum(widths) != columns:
        raise ValueError(
            f"{contract.op}: widths must be [{inner}, 0 or {inner}, {inner}, 0 or {channels}], "
            f"{columns} columns together, got {list(widths)}"
        )
    if directions > 2 or directions * channels != inner or heads % rows:
        raise ValueError(
            f"{contract.op}: {heads} heads of {dim} channels want 1 or 2 directions of "
            f"{inner} channels together and a position scale for every head or for neighbours, "
            f"got post_weight {[directions, channels]} and {rows} position scales"
        )
