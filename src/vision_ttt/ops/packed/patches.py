"""The op ``vision_ttt::packed_patches``: non-overlapping patches by a linear layer."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops._contract import Contract, Whole, check_number
from vision_ttt.ops._native import mirrors, pointer, run_kernel
from vision_ttt.ops._op import Backend, Op
from vision_ttt.ops.packed.linear import multiply
from vision_ttt.ops.packed.weights import DTYPES, PackedStructure, call, check_packed, refusal


class Inputs(NamedTuple):
    """The op's arguments, as :func:`packed_patches` has them."""

    images: Tensor
    weight: Tensor
    bias: Tensor | None
    columns: int
    size: Sequence[int]


def _check(op: str, values: Mapping[str, Any]) -> None:
    images, columns, size = values["images"].shape, values["columns"], values["size"]
    for number in (columns, *size):
        check_number(op, "columns and size", number, Whole(1))
    if len(size) != 2 or images[2] < size[0] or images[3] < size[1]:
        raise ValueError(
            f"{op}: size must be two numbers of at most the images' height and width, got "
            f"{list(size)} and images {list(images)}"
        )
    bias = values["bias"]
    if bias is not None and len(bias) != columns:
        raise ValueError(f"{op}: bias must be [{columns}], got {list(bias.shape)}")
    check_packed(op, values["weight"], columns, images[1] * size[0] * size[1])


CONTRACT = Contract(
    "packed_patches",
    {
        "images": "B C H W",
        "weight": "panels pairs 16 | panels pairs 16 2",
        "bias": "? columns_of_bias",
    },
    dtypes={"images": DTYPES, "weight": DTYPES, "bias": (torch.float32,)},
    others=("columns", "size"),
    further=_check,
)


@mirrors("PackedPatches")
class _PackedPatches(ctypes.Structure):
    _fields_ = (
        ("images", c_void_p),
        ("out", c_void_p),
        ("weight", PackedStructure),
        *((name, c_int64) for name in ("batch", "channels", "grid_height", "grid_width")),
        *((name, c_int64) for name in ("patch_width", "image_stride", "channel_stride")),
        *((name, c_int64) for name in ("row_stride", "is_bfloat16", "images_are_bfloat16")),
        ("threads", c_int64),
    )


def packed_patches_definition(inputs: Inputs) -> Tensor:
    """See :func:`packed_patches`."""
    images, weight, bias, columns, (height, width) = inputs
    patches = images.unfold(2, height, height).unfold(3, width, width)
    patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3)  # [B, rows, columns, C · h · w]
    return multiply(patches, weight, bias, columns)


def _forward(inputs: Inputs) -> Tensor:
    images, weight, bias, columns, (height, width) = inputs
    if images.stride(3) != 1:
        images = images.contiguous()
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    out = _fake(inputs)
    if not out.numel():
        return out
    batch, channels, *_ = images.shape
    problem = _PackedPatches.pack(
        *(images.data_ptr(), out.data_ptr(), weight.data_ptr(), pointer(bias)),
        *(channels * height * width, columns, 0),
        *(batch, channels, out.shape[1], out.shape[2], width, *images.stride()[:3]),
        *(weight.dtype == torch.bfloat16, images.dtype == torch.bfloat16),
        torch.get_num_threads(),
    )
    run_kernel("vision_ttt_packed_patches", problem)
    return out


def _result(images: Sequence[int], columns: int, size: Sequence[int]) -> tuple[int, ...]:
    return images[0], images[2] // size[0], images[3] // size[1], columns


def _fake(inputs: Inputs) -> Tensor:
    return inputs.images.new_empty(_result(inputs.images.shape, inputs.columns, inputs.size))


def _flops(shapes: Inputs) -> int:
    """Two FLOPs per number of W and patch."""
    batch, height, width, columns = _result(shapes.images, shapes.columns, shapes.size)
    return 2 * batch * height * width * columns * shapes.images[1] * shapes.size[0] * shapes.size[1]


OP = Op(
    "packed_patches",
    Inputs,
    CONTRACT,
    packed_patches_definition,
    {"cpu": Backend(_forward, None, lambda inputs: refusal(inputs.images))},
    _fake,
    schema="(Tensor images, Tensor weight, Tensor? bias, int columns, int[] size) -> Tensor",
    flops=_flops,
)


def packed_patches(
    images: Tensor, weight: Tensor, bias: Tensor | None, columns: int, size: tuple[int, int]
) -> Tensor:
    """Apply a linear layer to non-overlapping patches, for inference on a CPU.

    This is a convolution whose stride equals its kernel size, with a channels-last result. Factors
    are rounded to the dtype of the packed weight; sums are in float32.

    Args:
        images: [B, C, H, W], float32 or bfloat16. Pixels beyond the last whole patch are ignored.
        weight: ``pack(W, dtype)`` with W [columns, C · height · width].
        bias: [columns], float32, or None.
        columns: the channels of a token.
        size: (height, width) of a patch in pixels.

    Returns:
        Tokens [B, H // height, W // width, columns] in the images' dtype.

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: shapes do not fit.
    """
    return call(OP, Inputs(images, weight, bias, columns, tuple(size)))
