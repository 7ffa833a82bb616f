"""The op ``vision_ttt::packed_linear``: a linear layer whose weight is packed."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from ctypes import c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vision_ttt.ops._contract import Contract, Whole
from vision_ttt.ops._native import mirrors, pointer, run_kernel
from vision_ttt.ops._op import Backend, Op
from vision_ttt.ops.packed.weights import (
    DTYPES,
    PackedStructure,
    call,
    check_packed,
    refusal,
    unpack,
)


class Inputs(NamedTuple):
    """The op's arguments, as :func:`packed_linear` has them."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    columns: int


def _check_weight(op: str, values: Mapping[str, Any]) -> None:
    check_packed(op, values["weight"], values["columns"], values["x"].shape[-1])


CONTRACT = Contract(
    "packed_linear",
    {"x": "... inner", "weight": "panels pairs 16 | panels pairs 16 2", "bias": "? columns"},
    {"columns": Whole(1)},
    dtypes={"x": DTYPES, "weight": DTYPES, "bias": (torch.float32,)},
    further=_check_weight,
)


@mirrors("PackedLinear")
class _PackedLinear(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("weight", PackedStructure),
        *((name, c_int64) for name in ("rows", "x_row", "is_bfloat16", "x_is_bfloat16", "threads")),
    )


def packed_linear_definition(inputs: Inputs) -> Tensor:
    """See :func:`packed_linear`."""
    return multiply(*inputs)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    """x Wᵀ + b with a packed W in PyTorch, in at least float32; the result has x's dtype."""
    unpacked, rounded = (
        factor.to(torch.promote_types(factor.dtype, torch.float32))
        for factor in (unpack(weight, columns, x.shape[-1]), x.to(weight.dtype))
    )
    return F.linear(rounded, unpacked, bias).to(x.dtype)


def linear(x: Tensor, parameters: Mapping[str, Tensor], name: str) -> Tensor:
    """:func:`multiply` by the weight and the bias of a name."""
    bias = parameters[f"{name}.bias"]
    return multiply(x, parameters[name], bias, len(bias))


def _forward(inputs: Inputs) -> Tensor:
    x, weight, bias, columns = inputs
    inner = x.shape[-1]
    out = x.new_empty(*x.shape[:-1], columns)
    if not out.numel():
        return out
    rows = x.reshape(-1, inner)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    problem = _PackedLinear.pack(
        *(rows.data_ptr(), out.data_ptr(), weight.data_ptr(), pointer(bias), inner, columns, 0),
        *(rows.shape[0], rows.stride(0)),
        *(weight.dtype == torch.bfloat16, x.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    run_kernel("vision_ttt_packed_linear", problem)
    return out


def _fake(inputs: Inputs) -> Tensor:
    return inputs.x.new_empty(*inputs.x.shape[:-1], inputs.columns)


OP = Op(
    "packed_linear",
    Inputs,
    CONTRACT,
    packed_linear_definition,
    {"cpu": Backend(_forward, None, lambda inputs: refusal(inputs.x))},
    _fake,
    schema="(Tensor x, Tensor weight, Tensor? bias, int columns) -> Tensor",
    flops=lambda shapes: 2 * math.prod(shapes.x) * shapes.columns,
)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    """x Wᵀ + b with W packed by :func:`pack`, for inference on a CPU.

    Factors are rounded to the dtype of the packed W; sums are in float32.

    Args:
        x: [..., inner], float32 or bfloat16.
        weight: ``pack(W, dtype)``.
        bias: [columns], float32, or None.
        columns: the number of W's rows.

    Returns:
        [..., columns] in x's dtype.

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: shapes do not fit.
    """
    return call(OP, Inputs(x, weight, bias, columns))
