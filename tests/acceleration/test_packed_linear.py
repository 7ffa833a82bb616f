"""The packed product equals the product of the unpacked matrices."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tolerances import FORWARD, assert_close
from vision_ttt.acceleration.packed_linear import PackedLinear
from vision_ttt.ops.packed import pack, packed_linear, unpack

pytestmark = pytest.mark.kernels

DTYPES = (torch.float32, torch.bfloat16)
SIZES = (
    (1, 1, 1),
    (5, 3, 7),
    (6, 64, 64),
    (13, 17, 65),
    (97, 50, 100),
    (200, 192, 6),
    (7, 33, 128),
    (15, 32, 33),
    (17, 64, 48),
    (98, 192, 100),
    (129, 96, 16),
    (600, 50, 37),  # from 512 rows on in tile registers, also in float32
    (513, 192, 100),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner", "columns"), SIZES)
def test_it_is_the_product(rows, inner, columns, dtype):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, inner), torch.randn(columns, inner), torch.randn(columns)
    packed = pack(weight, dtype)
    assert torch.equal(unpack(packed, columns, inner), weight.to(dtype))
    of_block = pack(weight, dtype, of_block=True)
    assert torch.equal(unpack(of_block, columns, inner), weight.to(dtype))
    wanted = F.linear(x.to(dtype).double(), weight.to(dtype).double())
    assert_close(packed_linear(x, packed, None, columns), wanted, 1e-6)
    assert_close(packed_linear(x, packed, bias, columns), wanted + bias, 1e-6)
    half = packed_linear(x.bfloat16(), packed, bias, columns)
    assert half.dtype == torch.bfloat16
    wanted = F.linear(x.bfloat16().double(), weight.to(dtype).double(), bias.double())
    assert_close(half, wanted, FORWARD[torch.bfloat16])


@pytest.mark.parametrize("inner", [50, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(inner, dtype):
    """Threads share rows as they come, and registers hold more or fewer of them at once.

    From 512 rows on float32 is multiplied in another way, if there are tile registers.
    """
    x, packed = torch.randn(70, inner), pack(torch.randn(40, inner), dtype)
    wanted = packed_linear(x, packed, None, 40)
    for rows in range(1, 70):
        assert torch.equal(packed_linear(x[:rows], packed, None, 40), wanted[:rows]), rows


@pytest.mark.parametrize("inner", [50, 64])
@pytest.mark.parametrize("rows", [1, 5, 6, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_the_columns_of_few_rows(rows, dtype, inner):
    x, weight, bias = torch.randn(rows, inner), torch.randn(300, inner), torch.randn(300)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(packed_linear(x, pack(weight, dtype), bias, 300))
    finally:
        torch.set_num_threads(before)
    assert_close(results[0], F.linear(x, weight, bias), FORWARD[dtype])
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_any_axes_and_strides():
    x, weight = torch.randn(3, 70, 4, 64), torch.randn(40, 64)
    packed, wanted = pack(weight, torch.float32), F.linear(x, weight)
    assert_close(packed_linear(x, packed, None, 40), wanted, 1e-6)
    assert_close(packed_linear(x[0, 0, 0], packed, None, 40), wanted[0, 0, 0], 1e-6)
    assert_close(packed_linear(x[:, ::7], packed, None, 40), wanted[:, ::7], 1e-6)
    turned = x.transpose(1, 3).contiguous().transpose(1, 3)
    assert_close(packed_linear(turned, packed, None, 40), wanted, 1e-6)
    assert packed_linear(x[:0], packed, None, 40).shape == (0, 70, 4, 40)


def test_nothing_spoils_the_neighbours():
    """NaN beyond the requested columns and rows would show where padding is multiplied."""
    memory = torch.full((9, 80), torch.nan)
    x = memory[:7, :33].copy_(torch.randn(7, 33))
    weight = torch.randn(21, 33)
    for dtype in DTYPES:
        got = packed_linear(x, pack(weight, dtype), None, 21)
        assert_close(got, F.linear(x, weight), FORWARD[dtype])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"x": torch.randn(4, 9)},
            ValueError,
            r"\[5, 9\] packed .* must be \[1, 9, 16\], got \[1, 8, 16\]",
        ),
        ({"x": torch.randn(4, 8).double()}, TypeError, "torch.float64"),
        ({"columns": 17}, ValueError, r"must be \[2, 8, 16\]"),
        ({"columns": 0}, ValueError, "at least 1"),
        ({"bias": torch.randn(4)}, ValueError, r"bias must have shape \[5\], got \[4\]"),
        ({"bias": torch.randn(5).half()}, TypeError, "float16"),
        ({"x": None}, TypeError, "x must be a tensor, got NoneType"),
    ],
)
def test_bad_input(change, error, message):
    arguments = {"x": torch.randn(4, 8), "weight": pack(torch.randn(5, 8), torch.float32)}
    arguments |= {"bias": None, "columns": 5} | change
    with pytest.raises(error, match=message):
        packed_linear(**arguments)


@pytest.mark.parametrize("weight", [torch.randn(3), torch.randn(2, 0)])
def test_only_matrices_are_packed(weight):
    with pytest.raises(ValueError, match="columns, inner"):
        pack(weight, torch.float32)
    with pytest.raises(ValueError, match="float16"):
        pack(torch.randn(2, 2), torch.float16)


def test_opcheck():
    packed = pack(torch.randn(5, 8), torch.float32)
    for x in (torch.randn(3, 8), torch.randn(2, 3, 8, dtype=torch.bfloat16)):
        torch.library.opcheck(
            torch.ops.vision_ttt.packed_linear.default, (x, packed, torch.randn(5), 5)
        )


def test_a_layer_says_what_it_is():
    assert "in_features=8, out_features=5" in repr(PackedLinear(nn.Linear(8, 5), torch.float32))
