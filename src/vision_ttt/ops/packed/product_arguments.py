"""The checks that the ops of one packed weight share."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops._contract import check_storages
from vision_ttt.ops.packed.weights import DTYPES, packed_shape


def check_tensors(op: str, weight: Tensor, bias: Tensor | None, **inputs: Tensor) -> None:
    """Raise an error unless these are dense tensors on a CPU with dtypes that a product accepts.

    Args:
        op: its name, for messages.
        weight: of :func:`vision_ttt.ops.packed.pack`.
        bias: float32, or None.
        inputs: the op's input by its name there.

    Raises:
        TypeError: an argument is no tensor, or a dtype is not accepted.
        ValueError: a tensor is not a dense one on a CPU, or its storage has been freed.
    """
    tensors = {**inputs, "weight": weight}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):  # PyTorch passes None for a tensor without complaint
            raise TypeError(f"{op}: {name} must be a tensor, got {tensor!r}")
    if any(tensor.dtype not in DTYPES for tensor in tensors.values()):
        got = ", ".join(str(tensor.dtype) for tensor in tensors.values())
        raise TypeError(f"{op}: dtypes must be of {DTYPES}, got {got}")
    if bias is not None and bias.dtype != torch.float32:
        raise TypeError(f"{op}: bias must be float32, got {bias.dtype}")
    given = [*tensors.values()] if bias is None else [*tensors.values(), bias]
    if any(not tensor.is_cpu or tensor.layout != torch.strided for tensor in given):
        got = ", ".join(f"{tensor.layout} on {tensor.device}" for tensor in given)
        raise ValueError(f"{op}: tensors must be dense and on a CPU, got {got}")
    check_storages(op, {**tensors, "bias": bias})


def check_weight(
    op: str,
    weight: torch.Size,
    dtype: torch.dtype,
    bias: torch.Size | None,
    columns: int,
    inner: int,
) -> None:
    """Raise an error unless the shapes are those of a packed weight [columns, inner] and its bias.

    Raises:
        ValueError: they are not.
    """
    shape = packed_shape(columns, inner, dtype)
    if weight != shape:
        raise ValueError(
            f"{op}: weight [{columns}, {inner}] packed in {dtype} must be {list(shape)}, "
            f"got {list(weight)}"
        )
    if bias is not None and bias != (columns,):
        raise ValueError(f"{op}: bias must be [{columns}], got {list(bias)}")
