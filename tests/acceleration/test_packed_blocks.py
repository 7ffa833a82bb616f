"""A block on packed weights computes what the block computes, to rounding."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from inference_blocks import BLOCKS, DIM, PUBLISHED, inputs, make, pack_block
from tolerances import FORWARD, assert_close
from vision_ttt.layers import TTTLinear, VitttBlock, VitttMixer
from vision_ttt.layers.rotary2d import rotary_table
from vision_ttt.ops import use_backend
from vision_ttt.ops._native import instruction_set
from vision_ttt.ops.packed import (
    mamba_block,
    swiglu_ttt_block,
    unpack,
    vit3_block,
    vittt_blocks,
)

pytestmark = pytest.mark.kernels

MODULES = (mamba_block, swiglu_ttt_block, vit3_block, vittt_blocks)
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((1, (1, 1)), (3, (5, 7)), (1, (23, 17)), (2, (14, 14)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BLOCKS)
def test_it_is_the_block(name, dtype):
    block = make(name)
    packed = pack_block(block, dtype)
    for batch, grid in SHAPES:
        given = inputs(name, batch, grid)
        before = given[0].clone()
        assert_close(packed(*given), block(*given), FORWARD[dtype], f"{grid}")
        assert torch.equal(given[0], before)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mini_batch_size", [4, 16, 20])
def test_heads_of_other_widths(dim, mini_batch_size):
    """Products in tile registers hold mini-batches of up to 16 tokens."""
    torch.manual_seed(0)
    ttt = TTTLinear(dim, 1, mini_batch_size=mini_batch_size, **PUBLISHED)
    block = VitttBlock(VitttMixer(dim, ttt=ttt), dim, 96).eval().requires_grad_(False)
    packed, y = pack_block(block, torch.bfloat16), torch.randn(2, 77, dim)
    assert_close(packed(y, (7, 11)), block(y, (7, 11)), FORWARD[torch.bfloat16])
    assert torch.equal(packed(y, (7, 11)), packed(y, (7, 11)))


def op_of(packed):
    """The op of a block, and its inputs with tokens y of a grid."""
    weights = packed.weights
    if type(packed).__name__ == "PackedMambaBlock":
        return mamba_block.OP, lambda y, _: (y, weights, packed.sizes, packed.eps)
    if type(packed).__name__ == "PackedVitttBlock":
        floats = (packed.rate, *packed.eps)
        return vittt_blocks.OP, lambda y, grid: (y, weights[None], (*grid, *packed.sizes), floats)
    if type(packed).__name__ == "PackedLinearBlock":
        # Eight tokens of nine rows are none of the grid's.
        rotations = torch.randn(64, DIM) if packed.sizes.scaled else None
        return swiglu_ttt_block.OP, lambda y, grid: (
            *(y, packed.weights, rotations),
            *((grid[0] - 1, grid[1], *packed.sizes), (0.3, *packed.eps)),
        )
    floats = (0.3, *packed.eps)
    modulation = torch.randn(2, 6, DIM) if packed.sizes.modulated else None
    table = rotary_table((9, 8), DIM) if packed.sizes.convolved else None
    return vit3_block.OP, lambda y, grid: (
        *(y, weights, modulation, table),
        *((*grid, *packed.sizes), floats),
    )


@pytest.mark.parametrize("name", BLOCKS)
def test_the_dispatcher_is_left_out_where_nothing_listens(name, monkeypatch):
    packed, given = pack_block(make(name), torch.float32), inputs(name, 2, (5, 7))
    op, _ = op_of(packed)
    dispatched, custom_op = [], op.forward_op
    monkeypatch.setattr(op, "forward_op", lambda *a: dispatched.append(1) or custom_op(*a))
    wanted = packed(*given)
    assert not dispatched
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(packed(*given), wanted)
    assert dispatched == [1]
    assert counter.get_total_flops() > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BLOCKS)
def test_it_is_its_definition(name, dtype):
    """The definition rounds to bfloat16 where the kernels do; the bounds are tighter."""
    packed, (y, *_) = pack_block(make(name), dtype), inputs(name, 2, (9, 8))
    op, arguments = op_of(packed)
    given = op.inputs(*arguments(y, (9, 8)))
    wanted = op.definition(given)
    assert_close(op.forward_op(*given), wanted, 1e-5 if dtype == torch.float32 else 4e-3)
    with use_backend("reference"):
        assert_close(op(given), wanted, 1e-5)


@pytest.mark.parametrize("module", MODULES)
def test_a_table_names_the_fields_that_the_kernel_reads(module):
    block = module.BLOCK
    for name, part in block.parameters.items():
        assert f"{name}.data" in block.fields if part.is_packed else name in block.fields
    assert set(block.floats) <= set(block.fields)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", ["vittt with TTT-MLP", "mamba of other sizes", "h-vit3", "linear, scaled"]
)
def test_parameters_come_back_from_their_vector(name, dtype):
    packed = pack_block(make(name), dtype)
    op, _ = op_of(packed)
    block = next(m.BLOCK for m in MODULES if m.OP is op)
    places = block.places(DIM, packed.sizes)
    parameters = {
        field: unpack(x, *places[field].size) if places[field].is_packed else x
        for field, x in block.split(packed.weights, DIM, packed.sizes).items()
    }
    assert torch.equal(block.join(parameters, DIM, packed.sizes), packed.weights)
    field = next(iter(places))
    with pytest.raises(ValueError, match=rf"{field} must be .*, got \[0\]"):
        block.join({**parameters, field: torch.empty(0)}, DIM, packed.sizes)
    assert packed.bfloat16().weights.dtype == torch.int32  # no cast changes the bits


@pytest.mark.parametrize("name", ["vittt", "vit3", "h-vit3", "mamba", "linear"])
def test_threads_of_openmp(name):
    packed, given = pack_block(make(name), torch.float32), inputs(name, 1, (31, 14))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(packed(*given))
            assert torch.equal(packed(*given), results[-1])  # the same bits again
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert_close(result, results[0], 1e-6)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_of_unequal_speed(threads):
    """Threads share an image's tokens by their speeds, which change; its bits do not."""
    torch.manual_seed(0)
    mixer = VitttMixer(192, ttt=TTTLinear(192, 3, **PUBLISHED))
    packed = pack_block(VitttBlock(mixer, 192, 512).eval().requires_grad_(False), torch.float32)
    y, before = torch.randn(1, 196, 192), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted = packed(y, (14, 14))
        torch.set_num_threads(threads)  # three are more than some machines have cores
        assert all(torch.equal(packed(y, (14, 14)), wanted) for _ in range(30))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "grid"), [(1, (31, 14)), (3, (31, 14)), (5, (31, 14)), (1, (1, 2))]
)
def test_threads_of_a_mamba_block(batch, grid, dtype):
    """Directions that meet, whole images per thread, and teams give the same bits.

    Of a team on few tokens some threads have none.
    """
    packed, given = pack_block(make("mamba"), dtype), inputs("mamba", batch, grid)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 4, 7, 12):
            torch.set_num_threads(threads)
            results.append(packed(*given))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("name", ["vittt", "vit3", "mamba", "linear"])
def test_threads_of_python(name):
    packed, given = pack_block(make(name), torch.bfloat16), inputs(name, 1, (12, 11))
    wanted = packed(*given)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: packed(*given), range(16)):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["vittt", "vit3", "mamba", "linear"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_images_alone(name, dtype):
    packed, (y, grid) = pack_block(make(name), dtype), inputs(name, 3, (6, 9))
    wanted = packed(y, grid)
    assert torch.equal(packed(y.transpose(1, 2).contiguous().transpose(1, 2), grid), wanted)
    for i in range(3):
        assert_close(packed(y[i : i + 1], grid), wanted[i : i + 1], 1e-6)


@pytest.mark.parametrize("extra", [(0,), (3,), (0, 36)])
def test_class_tokens(extra):
    block = make("vittt")
    y = torch.randn(2, 35 + len(extra), DIM)
    assert_close(pack_block(block, torch.float32)(y, (5, 7), extra), block(y, (5, 7), extra), 1e-5)


@pytest.mark.parametrize("extra", [(0,), (3, 20), (35,)])
def test_tokens_outside_the_grid_of_a_linear_block(extra):
    block = make("linear")
    y = torch.randn(2, 35 + len(extra), DIM)
    assert_close(pack_block(block, torch.float32)(y, (5, 7), extra), block(y, (5, 7), extra), 1e-5)


def test_the_step_of_a_linear_block_counts():
    """What the bounds of the tests above are compared with."""
    for name in ("linear", "linear, scaled"):
        block, (y, *given) = make(name), inputs(name, 2, (9, 8))
        out = block(y, *given)
        block.attn.qkv.weight[2 * DIM :] = 0  # values, without which nothing is learnt
        if block.attn.qkv.bias is not None:
            block.attn.qkv.bias[2 * DIM :] = 0
        away = (block(y, *given) - out).abs().max() / out.abs().max()
        assert away > 0.05, name


def test_keys_far_from_zero():
    """Their variance is not lost in their mean."""
    block = make("linear")
    block.attn.qkv.bias[DIM : 2 * DIM] += 1e3
    y = torch.randn(2, 221, DIM)
    wanted = pack_block(make("linear"), torch.float32)(y, (13, 17))
    assert_close(pack_block(block, torch.float32)(y, (13, 17)), wanted, 1e-3)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_wrong_grid_is_refused(name):
    packed, (y, *rest) = pack_block(make(name), torch.float32), inputs(name, 1, (5, 7))
    if name == "the bare layer" or "mamba" in name:
        pytest.skip("it sees no grid")
    with pytest.raises(ValueError, match=r"35|grid"):
        packed(y[:, 1:], *rest)


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512", "avx512bf16"])
def test_other_instruction_sets(isa, load_kernels):
    """They have narrower registers, no products of bfloat16, or no tile registers."""
    order = ["baseline", "avx2", "avx512", "avx512bf16"]
    assert order.index(load_kernels(isa)) <= order.index(isa)
    for name in ("vittt", "vittt with TTT-MLP", "vit3", "h-vit3", "mamba", "linear, rotated"):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            block, given = make(name), inputs(name, 2, (9, 11))
            got, wanted = pack_block(block, dtype)(*given), block(*given)
            assert_close(got, wanted, tolerance, f"{name} {dtype}")


@pytest.mark.skipif(instruction_set() != "amx", reason="all others have the same layouts")
@pytest.mark.parametrize("name", ["vittt", "vit3", "mamba", "linear"])
def test_a_layout_for_tile_registers_is_refused_without_them(name, load_kernels):
    packed, given = pack_block(make(name), torch.float32), inputs(name, 1, (5, 7))
    packed(*given)
    load_kernels("avx512bf16")
    with pytest.raises(ValueError, match="must be"):
        packed(*given)
