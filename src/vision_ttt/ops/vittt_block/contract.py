"""What vittt_block asks of its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vision_ttt.ops import fused_ttt_linear
from vision_ttt.ops._contract import Contract, Real, Whole
from vision_ttt.ops._native import LANES

PARAMETERS = {
    "conv2d": "D 1 K K",
    "norm_weight": "D",
    "norm_bias": "D",
    "in_proj": "C D",
    "rate_weight": "H D",
    "rate_bias": "H",
    "conv_q_weight": "H*d 1 taps",
    "conv_q_bias": "H*d",
    "conv_k_weight": "H*d 1 taps",
    "conv_k_bias": "H*d",
    "w0": "H d d",
    "b0": "H d",
    "inner_weight": "H d",
    "inner_bias": "H d",
    "position_offset": "R b",
    "post_weight": "R D",
    "post_bias": "R D",
    "out_proj": "D D",
    "mlp_norm_weight": "D",
    "mlp_norm_bias": "D",
    "fc1": "2*hidden D",
    "fc2": "D hidden",
}
"""A block's parameters: D channels, R directions, H heads of both, H · d = R · D.

The projection's C columns are k, q, v and the gate, of R · D, R · D or 0, R · D, and D or 0.
"""
CONTRACT = Contract(
    "vittt_block",
    {"y": "B height*width D", **PARAMETERS},
    {
        "height": Whole(1),
        "width": Whole(1),
        "q_columns": Whole(0),
        "gate_columns": Whole(0),
        "base_learning_rate": Real(0),
        "norm_eps": Real(0),
        "inner_eps": Real(0),
        "post_eps": Real(0),
        "mlp_norm_eps": Real(0),
    },
    odd=("K",),
)


def fits(head_dim: int, dim: int, mini_batch_size: int, hidden: int) -> bool:
    """Whether the kernels take a block of these sizes."""
    return hidden % LANES == 0 and fused_ttt_linear.fits(head_dim, dim, mini_batch_size)


def check(values: Mapping[str, Any]) -> None:
    """Raise unless tensors and numbers are one block's, of sizes that the kernels take.

    Raises:
        TypeError, ValueError: as :meth:`Contract.check`.
    """
    CONTRACT.check(values)
    heads, head_dim = values["b0"].shape
    inner, dim = heads * head_dim, values["y"].shape[-1]
    q_columns, gate_columns = values["q_columns"], values["gate_columns"]
    columns, wanted = values["in_proj"].shape[0], 2 * inner + q_columns + gate_columns
    if q_columns not in (0, inner) or gate_columns not in (0, dim) or columns != wanted:
        raise ValueError(
            f"vittt_block: in_proj must have 2 * {inner} columns, q_columns (0 or {inner}) and "
            f"gate_columns (0 or {dim}) more, got {columns}, {q_columns} and {gate_columns}"
        )
    directions, mini_batch_size = values["position_offset"].shape
    if directions > 2 or directions * dim != inner or heads % directions:
        raise ValueError(
            f"vittt_block: {heads} heads of {head_dim} channels want 1 or 2 directions of {dim} "
            f"channels, got {directions} position offsets"
        )
    hidden = values["fc2"].shape[1]
    if not fits(head_dim, dim, mini_batch_size, hidden):
        raise ValueError(
            f"vittt_block: the kernel takes no heads of {head_dim} channels in mini-batches of "
            f"{mini_batch_size}, with {dim} channels and {hidden} hidden units"
        )
