"""The op ``vision_ttt::vittt_block``: fills in csrc/vittt_block/vittt_block.h and calls it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vision_ttt.ops._native import LIBRARY, call_kernel, require_servable
from vision_ttt.ops.ttt_linear.autograd import ttt_linear_flops
from vision_ttt.ops.vittt_block.contract import CONTRACT, PARAMETERS, check


def _sgemm() -> int | None:
    """Address of the matrix product behind PyTorch's own, where its library hands it out."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        function = getattr(ctypes.CDLL(str(path)), "sgemm_", None)
        if function is not None:
            return ctypes.cast(function, c_void_p).value
    return None


SGEMM = None if LIBRARY is None else _sgemm()


class _VitttBlock(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("y", "out", "scratch", "sgemm")),
        ("parameters", c_void_p * len(PARAMETERS)),
        *((name, c_int64) for name in ("batch", "height", "width", "dim", "heads", "directions")),
        *((name, c_int64) for name in ("q_columns", "gate_columns", "kernel", "taps")),
        *((name, c_int64) for name in ("mini_batch_size", "hidden", "threads")),
        *((name, c_float) for name in ("norm_eps", "inner_eps", "post_eps", "mlp_norm_eps")),
        ("rate", c_float),
    )


if LIBRARY is not None:
    LIBRARY.vision_ttt_vittt_block_scratch.restype = c_int64

# Defined without torch.library.custom_op's layer for autograd: this op has no gradient.
torch.library.define(
    "vision_ttt::vittt_block",
    "(Tensor y, Tensor[] parameters, SymInt height, SymInt width, int q_columns, int gate_columns, "
    "float base_learning_rate, float[] eps) -> Tensor",
)
vittt_block_op = torch.ops.vision_ttt.vittt_block.default


@torch.library.impl("vision_ttt::vittt_block", "CPU")
def _vittt_block(
    y: Tensor,
    parameters: Sequence[Tensor],
    height: int,
    width: int,
    q_columns: int,
    gate_columns: int,
    base_learning_rate: float,
    eps: Sequence[float],
) -> Tensor:
    if len(parameters) != len(PARAMETERS) or len(eps) != 4:
        raise ValueError(
            f"vittt_block: needs {len(PARAMETERS)} parameters and 4 eps, "
            f"got {len(parameters)} and {len(eps)}"
        )
    numbers = height, width, q_columns, gate_columns, base_learning_rate, *eps
    check(dict(zip(CONTRACT.names, (y, *parameters, *numbers), strict=True)))
    require_servable(CONTRACT.op, SGEMM is not None, y, *parameters)
    y = y.contiguous()
    parameters = [x.contiguous() for x in parameters]
    conv2d, conv_q, w0, position_offset, fc2 = (parameters[i] for i in (0, 6, 10, 14, 21))
    heads, head_dim, _ = w0.shape
    directions, mini_batch_size = position_offset.shape
    out = y.new_empty(y.shape)
    problem = _VitttBlock(
        *(y.data_ptr(), out.data_ptr(), None, SGEMM),
        (c_void_p * len(PARAMETERS))(*(x.data_ptr() for x in parameters)),
        *(y.shape[0], height, width, y.shape[2], heads, directions, q_columns, gate_columns),
        *(conv2d.shape[-1], conv_q.shape[-1], mini_batch_size, fc2.shape[1]),
        torch.get_num_threads(),
        *eps,
        base_learning_rate / head_dim,
    )
    reference = ctypes.byref(problem)
    scratch = y.new_empty(LIBRARY.vision_ttt_vittt_block_scratch(reference))
    problem.scratch = scratch.data_ptr()
    if call_kernel("vision_ttt_vittt_block", problem):
        raise MemoryError("vision_ttt::vittt_block: no memory for the scratch of a thread")
    return out


@torch.library.register_fake("vision_ttt::vittt_block")
def _(y: Tensor, *_: Any) -> Tensor:
    return y.new_empty(y.shape)


@register_flop_formula(torch.ops.vision_ttt.vittt_block)
def vittt_block_flops(
    y_shape: Sequence[int], parameter_shapes: Sequence[Sequence[int]], *_: Any, **__: Any
) -> int:
    """Those of the block's matrix products, convolutions and its ttt_linear."""
    batch, length, _ = y_shape
    conv2d, in_proj, rates, conv_q, conv_k, w0, position_offset, out_proj, fc1, fc2 = (
        parameter_shapes[i] for i in (0, 3, 4, 6, 8, 10, 14, 17, 20, 21)
    )
    weights = (conv2d, in_proj, rates, conv_q, conv_k, out_proj, fc1, fc2)
    products = 2 * batch * length * sum(math.prod(shape) for shape in weights)
    views = [batch, length, w0[0], w0[1]]
    return products + ttt_linear_flops(views, *[None] * 8, position_offset[1])
