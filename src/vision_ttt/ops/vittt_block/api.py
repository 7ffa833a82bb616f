"""The block's op: what it computes, and what it takes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from vision_ttt.ops import fused_ttt_linear
from vision_ttt.ops._native import LANES
from vision_ttt.ops.vittt_block.cpu import SGEMM, vittt_block_op


class Parameters(NamedTuple):
    """A block's parameters, float32: D channels, R directions, H heads of both, H · d = R · D.

    The projection's C columns are k, q, v and the gate, of R · D, R · D or 0, R · D, and D or 0.
    """

    conv2d: Tensor  # [D, 1, K, K]
    norm_weight: Tensor  # [D]
    norm_bias: Tensor
    in_proj: Tensor  # [C, D]
    rate_weight: Tensor  # [H, D]
    rate_bias: Tensor  # [H]
    conv_q_weight: Tensor  # [H · d, 1, taps]
    conv_q_bias: Tensor  # [H · d]
    conv_k_weight: Tensor
    conv_k_bias: Tensor
    w0: Tensor  # [H, d, d]
    b0: Tensor  # [H, d]
    inner_weight: Tensor  # [H, d]
    inner_bias: Tensor
    position_offset: Tensor  # [R, b]
    post_weight: Tensor  # [R, D]
    post_bias: Tensor
    out_proj: Tensor  # [D, D]
    mlp_norm_weight: Tensor  # [D]
    mlp_norm_bias: Tensor
    fc1: Tensor  # [2 · hidden, D]
    fc2: Tensor  # [D, hidden]


def fits(head_dim: int, dim: int, mini_batch_size: int, hidden: int) -> bool:
    """Whether the kernels take a block of these sizes, and there is a matrix product for them."""
    return (
        SGEMM is not None
        and hidden % LANES == 0
        and fused_ttt_linear.fits(head_dim, dim, mini_batch_size)
    )


def agree(
    parameters: Parameters, dim: int, mini_batch_size: int, q_columns: int, gate_columns: int
) -> bool:
    """Whether the parameters' shapes are one block's of ``dim`` channels.

    Modules refuse what does not fit together; the kernels would read on beside it.
    """
    p = parameters
    heads, head_dim = p.b0.shape
    directions = p.position_offset.shape[0]
    inner, hidden, kernel = directions * dim, p.fc2.shape[1], p.conv2d.shape[-1]
    scale, norm, bias = (dim,), (heads, head_dim), (inner,)
    taps = (inner, 1, p.conv_q_weight.shape[-1])
    post_norm = (directions, dim)
    return heads * head_dim == inner and tuple(x.shape for x in p) == (
        (dim, 1, kernel, kernel),
        *(scale, scale),
        (2 * inner + q_columns + gate_columns, dim),
        *((heads, dim), (heads,)),
        *(taps, bias, taps, bias),
        *((heads, head_dim, head_dim), norm, norm, norm),
        (directions, mini_batch_size),
        *(post_norm, post_norm),
        (dim, dim),
        *(scale, scale),
        *((2 * hidden, dim), (dim, hidden)),
    )


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
