"""A product of patches equals the convolution."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tolerances import FORWARD, assert_close
from vision_ttt.acceleration.packed_linear import PackedPatches
from vision_ttt.acceleration.supported_parts import UnsupportedPart
from vision_ttt.ops.packed import pack, packed_patches

pytestmark = pytest.mark.kernels

DTYPES = (torch.float32, torch.bfloat16)
SIZES = (
    # images, columns, patch
    ((1, 1, 1, 1), 1, (1, 1)),
    ((2, 3, 18, 11), 24, (4, 2)),
    ((1, 3, 35, 49), 40, (5, 7)),
    ((3, 2, 16, 200), 65, (8, 9)),
    ((2, 3, 96, 102), 21, (4, 6)),  # enough for tile registers, as is float32
    ((1, 3, 224, 224), 192, (16, 16)),
)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "columns", "size"), SIZES)
def test_it_is_the_convolution(shape, columns, size, dtype, bias):
    torch.manual_seed(0)
    images, weight = torch.randn(shape), torch.randn(columns, shape[1], *size)
    bias = torch.randn(columns) if bias else None
    packed = pack(weight.flatten(1), dtype)
    for x, tolerance in ((images, 1e-6), (images.bfloat16(), FORWARD[torch.bfloat16])):
        got = packed_patches(x, packed, bias, columns, size)
        rounded, factors = x.to(dtype).double(), weight.to(dtype).double()
        own = None if bias is None else bias.double()
        wanted = F.conv2d(rounded, factors, own, stride=size)
        assert got.dtype == x.dtype
        assert got.is_contiguous()
        assert_close(got.permute(0, 3, 1, 2), wanted, tolerance)


def test_any_strides():
    images, weight = torch.randn(2, 3, 12, 20), torch.randn(8, 3, 4, 5)
    packed, wanted = pack(weight.flatten(1), torch.float32), F.conv2d(images, weight, stride=(4, 5))
    for x in (
        images.contiguous(memory_format=torch.channels_last),
        images.transpose(2, 3).contiguous().transpose(2, 3),
        F.pad(images, (3, 2, 1, 4))[:, :, 1:-4, 3:-2],
        images.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        assert_close(packed_patches(x, packed, None, 8, (4, 5)).permute(0, 3, 1, 2), wanted, 1e-6)
    same = images[:1].expand(4, -1, -1, -1)
    got = packed_patches(same, packed, None, 8, (4, 5)).permute(0, 3, 1, 2)
    assert_close(got, wanted[:1].expand(4, -1, -1, -1), 1e-6)
    assert packed_patches(images[:0], packed, None, 8, (4, 5)).shape == (0, 3, 4, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_spoils_the_neighbours(dtype):
    """NaN around the images and beyond their last whole patch would show in the products."""
    memory = torch.full((2, 5, 16, 27), torch.nan)
    images = memory[:, 1:4, 3:12, 2:23].copy_(torch.randn(2, 3, 9, 21))
    images[:, :, 8:] = torch.nan
    images[:, :, :, 20:] = torch.nan
    weight = torch.randn(21, 3, 4, 5)
    got = packed_patches(images, pack(weight.flatten(1), dtype), None, 21, (4, 5))
    wanted = F.conv2d(images[:, :, :8, :20], weight, stride=(4, 5))
    assert_close(got.permute(0, 3, 1, 2), wanted, FORWARD[dtype])


def test_any_number_of_threads():
    images, weight = torch.randn(1, 3, 64, 80), pack(torch.randn(30, 48), torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(packed_patches(images, weight, None, 30, (4, 4)))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"images": torch.randn(3, 8, 8)}, ValueError, r"shape \[B, C, H, W\]"),
        ({"images": torch.randn(1, 3, 3, 8)}, ValueError, r"at most .* images \[1, 3, 3, 8\]"),
        ({"images": torch.randn(1, 2, 8, 8)}, ValueError, r"\[5, 16\] packed"),
        ({"images": torch.randn(1, 3, 8, 8).double()}, TypeError, "torch.float64"),
        ({"images": None}, TypeError, "images must be a tensor, got NoneType"),
        ({"size": (4, 0)}, ValueError, "size must be at least 1, got 0"),
        ({"size": (4,)}, ValueError, "two numbers"),
        ({"columns": 17}, ValueError, r"\[17, 24\] packed"),
        ({"bias": torch.randn(4)}, ValueError, r"bias must be \[5\], got \[4\]"),
        ({"bias": torch.randn(5).half()}, TypeError, "float16"),
    ],
)
def test_bad_input(change, error, message):
    arguments = {"images": torch.randn(1, 3, 8, 8), "weight": pack(torch.randn(5, 24), DTYPES[0])}
    arguments |= {"bias": None, "columns": 5, "size": (4, 2)} | change
    with pytest.raises(error, match=message):
        packed_patches(**arguments)


def test_opcheck():
    packed = pack(torch.randn(5, 24), torch.float32)
    for x in (torch.randn(2, 3, 9, 6), torch.randn(1, 3, 8, 8, dtype=torch.bfloat16)):
        torch.library.opcheck(
            torch.ops.vision_ttt.packed_patches.default, (x, packed, torch.randn(5), 5, [4, 2])
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_the_module(dtype, bias):
    conv = nn.Conv2d(3, 24, (4, 2), stride=(4, 2), bias=bias)
    images = torch.randn(2, 3, 18, 11)
    got = PackedPatches(conv, dtype)(images)
    assert_close(got, conv(images).detach(), FORWARD[dtype])
    assert got.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="B, 3, H, W"):
        PackedPatches(conv, dtype)(images[:, :2])


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Conv2d(4, 4, 2, stride=2, groups=4),
        nn.Conv2d(4, 4, 2, stride=2, padding=1),
        nn.Conv2d(4, 4, 2, stride=2, dilation=2),
    ],
)
def test_other_convolutions_stay(conv):
    with pytest.raises(UnsupportedPart):
        PackedPatches(conv, torch.float32)
