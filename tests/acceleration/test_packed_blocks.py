"""A block on packed weights computes what the block computes, to rounding."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from inference_blocks import BLOCKS, DIM, PUBLISHED, inputs, make, pack_block
from tolerances import FORWARD, assert_close
from vision_ttt.layers import TTTLinear, VitttBlock, VitttMixer
from vision_ttt.ops._native import instruction_set
from vision_ttt.ops.packed import (
    mamba_block,
    mamba_block_weights,
    vit3_block,
    vittt_block_weights,
    vittt_blocks,
)
from vision_ttt.ops.packed.mamba_block_definition import packed_mamba_block_definition
from vision_ttt.ops.packed.vit3_block import Vit3BlockParameters
from vision_ttt.ops.packed.vit3_block_definition import packed_vit3_block_definition
from vision_ttt.ops.packed.vittt_blocks_definition import packed_vittt_blocks_definition

pytestmark = pytest.mark.kernels

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


@pytest.mark.parametrize("name", BLOCKS)
def test_the_dispatcher_is_left_out_where_nothing_listens(name, monkeypatch):
    direct = []
    for module in (mamba_block, vit3_block, vittt_blocks):
        kernel = f"_packed_{module.__name__.rpartition('.')[2]}"
        original = getattr(module, kernel)
        monkeypatch.setattr(
            module, kernel, lambda *args, run=original: direct.append(1) or run(*args)
        )
    packed, given = pack_block(make(name), torch.float32), inputs(name, 2, (5, 7))
    wanted = packed(*given)
    assert len(direct) == 1
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(packed(*given), wanted)
    assert len(direct) == 1
    assert counter.get_total_flops() > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BLOCKS)
def test_it_is_its_definition(name, dtype):
    """The definition rounds to bfloat16 where the kernels do; the bounds are tighter."""
    packed, given = pack_block(make(name), dtype), inputs(name, 2, (9, 8))
    y, grid = given[0], (9, 8)
    p = dict(packed._buffers)
    if "vittt" in type(packed).__name__.lower():
        ints, floats = [*grid, *packed.sizes], [packed.rate, *packed.eps]
        wanted = packed_vittt_blocks_definition(y, packed.weights[None], ints, floats)
        got = torch.ops.vision_ttt.packed_vittt_blocks(y, packed.weights[None], ints, floats)
    elif "mamba" in name:
        arguments = y, packed.weights, list(packed.sizes), packed.eps
        wanted = packed_mamba_block_definition(*arguments)
        got = torch.ops.vision_ttt.packed_mamba_block(*arguments)
    else:
        p["modulation"] = torch.randn(2, 6, DIM) if name == "dit3" else p["modulation"]
        p["rotations"] = given[2] if name == "h-vit3" else p["rotations"]
        parameters = [p[field] for field in Vit3BlockParameters._fields]
        ints, floats = [*grid, packed.heads, packed.hidden, packed.tanh_gelu], [0.3, *packed.eps]
        wanted = packed_vit3_block_definition(y, parameters, ints, floats)
        got = torch.ops.vision_ttt.packed_vit3_block(y, parameters, ints, floats)
    assert_close(got, wanted, 1e-5 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_of_a_vittt_block_come_back_from_their_vector(dtype):
    packed = pack_block(make("vittt with TTT-MLP"), dtype)
    parameters = vittt_block_weights.split_parameters(packed.weights, DIM, packed.sizes)
    join_parameters = vittt_block_weights.join_parameters
    assert torch.equal(join_parameters(parameters, packed.sizes), packed.weights)
    with pytest.raises(ValueError, match=r"gate must be .*, got \[0\]"):
        join_parameters(parameters._replace(gate=torch.empty(0)), packed.sizes)
    assert packed.bfloat16().weights.dtype == torch.int32  # no cast changes the bits


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_of_a_mamba_block_come_back_from_their_vector(dtype):
    packed = pack_block(make("mamba of other sizes"), dtype)
    parameters = mamba_block_weights.split_parameters(packed.weights, DIM, packed.sizes)
    join_parameters = mamba_block_weights.join_parameters
    assert torch.equal(join_parameters(parameters, packed.sizes), packed.weights)
    with pytest.raises(ValueError, match=r"skip must be .*, got \[0\]"):
        join_parameters(parameters._replace(skip=torch.empty(0)), packed.sizes)


@pytest.mark.parametrize("name", ["vittt", "vit3", "h-vit3", "mamba"])
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


@pytest.mark.parametrize("name", ["vittt", "vit3", "mamba"])
def test_threads_of_python(name):
    packed, given = pack_block(make(name), torch.bfloat16), inputs(name, 1, (12, 11))
    wanted = packed(*given)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: packed(*given), range(16)):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["vittt", "vit3", "mamba"])
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
    for name in ("vittt", "vittt with TTT-MLP", "vit3", "h-vit3", "mamba"):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            block, given = make(name), inputs(name, 2, (9, 11))
            got, wanted = pack_block(block, dtype)(*given), block(*given)
            assert_close(got, wanted, tolerance, f"{name} {dtype}")


@pytest.mark.skipif(instruction_set() != "amx", reason="all others have the same layouts")
@pytest.mark.parametrize("name", ["vittt", "vit3", "mamba"])
def test_a_layout_for_tile_registers_is_refused_without_them(name, load_kernels):
    packed, given = pack_block(make(name), torch.float32), inputs(name, 1, (5, 7))
    packed(*given)
    load_kernels("avx512bf16")
    with pytest.raises(ValueError, match="must be"):
        packed(*given)
