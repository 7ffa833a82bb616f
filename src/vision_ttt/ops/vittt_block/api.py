"""The block's op: what it computes, and what it takes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from vision_ttt.ops.vittt_block import contract
from vision_ttt.ops.vittt_block.contract import PARAMETERS
from vision_ttt.ops.vittt_block.cpu import SGEMM, vittt_block_op

Parameters = NamedTuple("Parameters", [(name, Tensor) for name in PARAMETERS])
"""A block's parameters, float32, of the shapes that :data:`contract.PARAMETERS` names."""


def fits(head_dim: int, dim: int, mini_batch_size: int, hidden: int) -> bool:
    """Whether the kernels take a block of these sizes, and there is a matrix product for them."""
    return SGEMM is not None and contract.fits(head_dim, dim, mini_batch_size, hidden)


def vittt_block(
    y: Tensor,
    parameters: Parameters,
    *,
    grid: tuple[int, int],
    q_columns: int,
    gate_columns: int,
    base_learning_rate: float,
    norm_eps: float,
    inner_eps: float,
    post_eps: float,
    mlp_norm_eps: float,
) -> Tensor:
    """One block of Vision-TTT (Eq. 9 and Algorithm 1) of :class:`vision_ttt.VitttBlock`.

    The same arithmetic as the block's modules one after the other. What is saved is the way from
    one to the next, which on a small image takes a third of the time.

    Args:
        y: tokens [B, T, D], float32 on a CPU. It is left as it is.
        parameters: the block's, as they stand in its modules.
        grid: (h, w) with T = h · w.
        q_columns: of the projection; 0 where k serves for q.
        gate_columns: D, or 0 for no gate.
        base_learning_rate: η_base.
        norm_eps, inner_eps, post_eps, mlp_norm_eps: added to the norms' variances.

    Returns:
        [B, T, D]. No gradient follows: this is inference.

    Raises:
        TypeError: a dtype or type is not accepted.
        ValueError: the tensors and numbers are not one block's, or of sizes that do not fit.
    """
    return vittt_block_op(
        y,
        list(parameters),
        *grid,
        q_columns,
        gate_columns,
        base_learning_rate,
        [norm_eps, inner_eps, post_eps, mlp_norm_eps],
    )
