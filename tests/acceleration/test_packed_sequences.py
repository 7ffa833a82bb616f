"""Packed Vittt blocks that run as one op."""

import copy
import pickle

import pytest
import timm
import torch

from inference_blocks import DIM, inputs, make, vittt
from tolerances import FORWARD, assert_close
from vision_ttt.acceleration import for_inference
from vision_ttt.acceleration.packed_vittt import PackedVitttBlock, PackedVitttBlocks
from vision_ttt.acceleration.supported_parts import UnsupportedPart
from vision_ttt.models.block_sequence import BlockSequence
from vision_ttt.ops.packed.vittt_blocks import BLOCK, OP

GRID = (5, 7)


def sequence(name="vittt", depth=3):
    """Blocks with parameters of their own each."""
    blocks = BlockSequence(make(name) for _ in range(depth))
    for block in blocks:
        for parameter in block.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return blocks


def pack(blocks, dtype=torch.float32):
    return PackedVitttBlocks(BlockSequence(PackedVitttBlock(block, dtype) for block in blocks))


@pytest.fixture
def calls(monkeypatch):
    """How many blocks each call of the op had."""
    counts = []
    original = BLOCK.run

    def counting(y, weights, *others):
        counts.append(len(weights))
        return original(y, weights, *others)

    monkeypatch.setattr(BLOCK, "run", counting)
    return counts


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["vittt", "vittt with TTT-MLP", "the bare layer"])
def test_one_op_has_the_bits_of_its_blocks(name, dtype, depth, calls):
    blocks = sequence(name, depth)
    packed = pack(blocks, dtype)
    y, grid = inputs(name, 2, GRID)
    before = y.clone()
    got = packed(y, grid)
    assert calls == [depth]
    assert torch.equal(y, before)
    wanted = y
    for block in packed:
        wanted = block(wanted, grid)
    assert torch.equal(got, wanted)
    assert_close(got, blocks(y, grid), FORWARD[dtype])


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 2), (1, None), (-1, None), (2, 1), (0, 9)])
def test_a_part_of_the_blocks(start, stop, calls):
    blocks = sequence()
    packed, (y, grid) = pack(blocks), inputs("vittt", 1, GRID)
    assert_close(
        packed(y, grid, start=start, stop=stop), blocks(y, grid, start=start, stop=stop), 1e-5
    )
    assert sum(calls) == len(range(3)[start:stop])


@pytest.mark.parametrize("name", ["vittt", "the bare layer"])
def test_class_tokens(name, calls):
    blocks = sequence(name)
    y = torch.randn(2, 36, DIM)
    assert_close(pack(blocks)(y, GRID, (3,)), blocks(y, GRID, (3,)), 1e-5)
    assert calls == ([1, 1, 1] if name == "vittt" else [3])  # a Conv2d needs the grid between them


def test_a_wrong_grid_is_refused():
    with pytest.raises(ValueError, match="34"):
        pack(sequence())(torch.randn(1, 34, DIM), GRID)


def test_the_definition_is_of_all_blocks():
    packed, (y, grid) = pack(sequence()), inputs("vittt", 2, GRID)
    given = OP.inputs(y, packed.weights, [*grid, *packed.sizes], [packed.rate, *packed.eps])
    assert_close(packed(y, grid), OP.definition(given), 1e-5)
    for wrong, message in (
        (packed.weights[0], r"weights must have shape \[N, words\]"),
        (packed.weights[:0], "N must be at least 1"),
        (packed.weights[:, 1:], r"weights must be \d+ words for 64 channels"),
    ):
        with pytest.raises(ValueError, match=message):
            OP.forward_op(*given._replace(weights=wrong))


def test_blocks_share_the_memory_of_the_sequence():
    packed, (y, grid) = pack(sequence()), inputs("vittt", 1, GRID)
    wanted = packed(y, grid)
    assert torch.equal(pickle.loads(pickle.dumps(packed))(y, grid), wanted)
    for other in (packed, copy.deepcopy(packed)):
        assert torch.equal(other(y, grid), wanted)
        addresses = [block.weights.data_ptr() for block in other]
        assert addresses == [weights.data_ptr() for weights in other.weights]
    assert packed[:2].weights.shape[0] == 2


def test_blocks_of_other_kinds_or_sizes_are_called_one_by_one(calls):
    mixed = BlockSequence([*sequence(depth=2), vittt(bidirectional=True)]).eval()
    fast = for_inference(mixed)
    assert type(fast.model) is BlockSequence
    y = torch.randn(1, 35, DIM)
    with torch.no_grad():
        assert_close(fast(y, GRID), mixed(y, GRID), 1e-5)
    assert calls == [1, 1, 1]
    with pytest.raises(UnsupportedPart, match="different sizes"):
        PackedVitttBlocks(fast.model)
    with pytest.raises(UnsupportedPart, match="other blocks"):
        PackedVitttBlocks(sequence())


class Doubling(BlockSequence):
    def forward(self, x, *context, **options):
        return 2 * super().forward(x, *context, **options)


@torch.no_grad()
def test_a_sequence_with_a_hook_or_another_forward_stays():
    y = torch.randn(1, 35, DIM)
    for other in (Doubling(sequence()), sequence()):
        if type(other) is BlockSequence:
            other.register_forward_hook(lambda _module, _inputs, out: 3 * out)
        model = torch.nn.ModuleList([other]).eval()
        (kept,) = for_inference(model).model
        assert type(kept) is type(other)
        assert isinstance(kept[0], PackedVitttBlock)
        assert_close(kept(y, GRID), other(y, GRID), 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", [torch.nn.ModuleList, lambda blocks: torch.nn.Sequential(*blocks)])
def test_a_list_in_place_of_the_sequence(kind):
    model = timm.create_model("vittt_nano_patch4_32").eval()
    images = torch.randn(1, 3, 32, 32)
    wanted = model(images)
    model.blocks = kind(list(model.blocks))
    assert torch.equal(model(images), wanted)
    assert_close(for_inference(model)(images), wanted, 1e-5)
    model.set_input_size(64)
    model.prune_intermediate_layers([0])
    assert len(model.blocks) == 1


def test_hooks_that_would_not_be_called_are_refused():
    packed = pack(sequence())
    for register in (packed[0].register_forward_hook, packed[0].register_forward_pre_hook):
        with pytest.raises(RuntimeError, match="call for_inference again"):
            register(lambda *_: None)
