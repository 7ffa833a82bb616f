"""The op ``vision_ttt::packed_patches``: non-overlapping patches by a linear layer."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vision_ttt.ops._dispatcher_bypass import may_bypass_dispatcher
from vision_ttt.ops._native import LIBRARY, call_kernel, mirrors
from vision_ttt.ops.packed.linear import packed_linear_definition
from vision_ttt.ops.packed.product_arguments import check_tensors, check_weight
from vision_ttt.ops.packed.weights import PackedStructure, resolve_negative


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


def packed_patches(
    images: Tensor, weight: Tensor, bias: Tensor | None, columns: int, size: tuple[int, int]
) -> Tensor:
    """Linear layer of non-overlapping patches, for inference on a CPU.

    It is the convolution whose stride is its kernel's size, with channels last. Factors are rounded
    to the dtype of the packed weight; sums are in float32.

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
        ValueError: shapes do not fit, or a tensor is not a dense one on a CPU.
    """
    if may_bypass_dispatcher((images, weight, bias)):
        return _packed_patches(images, weight, bias, columns, size)
    return torch.ops.vision_ttt.packed_patches(images, weight, bias, columns, list(size))


torch.library.define(
    "vision_ttt::packed_patches",
    "(Tensor images, Tensor weight, Tensor? bias, int columns, int[] size) -> Tensor",
)


@functools.lru_cache(maxsize=256)
def _check_shapes(
    images: torch.Size,
    weight: torch.Size,
    dtype: torch.dtype,
    bias: torch.Size | None,
    columns: int,
    size: tuple[int, ...],
) -> None:
    if len(size) != 2 or min(size) < 1 or columns < 1:
        raise ValueError(
            "packed_patches: size must be two numbers of at least 1 and columns at least 1, got "
            f"{list(size)} and {columns}"
        )
    if len(images) != 4 or not images[1] or images[2] < size[0] or images[3] < size[1]:
        raise ValueError(
            f"packed_patches: images must be [B, C, H, W] with H ≥ {size[0]} and W ≥ {size[1]}, "
            f"got {list(images)}"
        )
    check_weight("packed_patches", weight, dtype, bias, columns, images[1] * size[0] * size[1])


def _packed_patches(
    images: Tensor, weight: Tensor, bias: Tensor | None, columns: int, size: Sequence[int]
) -> Tensor:
    check_tensors("packed_patches", weight, bias, images=images)
    bias_shape = None if bias is None else bias.shape
    _check_shapes(images.shape, weight.shape, weight.dtype, bias_shape, columns, tuple(size))
    if LIBRARY is None:
        return packed_patches_definition(images, weight, bias, columns, size)
    images = resolve_negative(images)
    if images.stride(3) != 1:
        images = images.contiguous()
    weight = resolve_negative(weight).contiguous()
    bias = None if bias is None else resolve_negative(bias).contiguous()
    out = images.new_empty(_result_shape(images.shape, columns, size))
    if out.numel():
        batch, channels, *_ = images.shape
        problem = _PackedPatches(
            images.data_ptr(),
            out.data_ptr(),
            PackedStructure.of(weight, bias, columns, channels * size[0] * size[1]),
            *(batch, channels, out.shape[1], out.shape[2], size[1], *images.stride()[:3]),
            *(weight.dtype == torch.bfloat16, images.dtype == torch.bfloat16),
            torch.get_num_threads(),
        )
        if call_kernel("vision_ttt_packed_patches", problem):
            raise MemoryError("packed_patches: not enough memory for the scratch of a thread")
    return out


def packed_patches_definition(
    images: Tensor, weight: Tensor, bias: Tensor | None, columns: int, size: Sequence[int]
) -> Tensor:
    """The definition of :func:`packed_patches`, in PyTorch's operations."""
    height, width = size
    patches = images.unfold(2, height, height).unfold(3, width, width)
    patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3)  # [B, rows, columns, C · h · w]
    return packed_linear_definition(patches, weight, bias, columns)


def _result_shape(images: Sequence[int], columns: int, size: Sequence[int]) -> tuple[int, ...]:
    return images[0], images[2] // size[0], images[3] // size[1], columns


torch.library.impl("vision_ttt::packed_patches", "CPU", _packed_patches)


@torch.library.register_fake("vision_ttt::packed_patches")
def _(
    images: Tensor, weight: Tensor, bias: Tensor | None, columns: int, size: Sequence[int]
) -> Tensor:
    return images.new_empty(_result_shape(images.shape, columns, size))


@register_flop_formula(torch.ops.vision_ttt.packed_patches)
def packed_patches_flops(
    images: Sequence[int],
    _weight: object,
    _bias: object,
    columns: int,
    size: Sequence[int],
    **_: object,
) -> int:
    """Two FLOPs per number of W and patch."""
    batch, height, width, _columns = _result_shape(images, columns, size)
    return 2 * batch * height * width * columns * images[1] * size[0] * size[1]
