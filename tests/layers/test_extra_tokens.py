"""Extra tokens: their positions, and that they go in and come out, for every layout and length."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounter

from vision_ttt.layers import ExtraTokens
from vision_ttt.layers.extra_tokens import PLACEMENTS, merge_extra, split_extra

GOLDEN = Path(__file__).parents[1] / "golden" / "mambar_model_cls3_reduce1"
LENGTHS = (1, 2, 7, 12, 35, 196)  # of grids 1 × 1, 1 × 2, 1 × 7, 3 × 4, 5 × 7, 14 × 14
LAYOUTS = [
    *((placement, count) for placement in ("head", "middle", "end") for count in (1, 2, 5, 12)),
    ("double", 2),
    *(("even", count) for count in (1, 2, 3, 4, 8, 12)),
]


def sequence(placement, count, length):
    """The layout written out: image tokens as 0 … length - 1, extra ones as -1."""
    image, extra = list(range(length)), [-1]
    if placement == "head":
        return extra * count + image
    if placement == "middle":
        return image[: length // 2] + extra * count + image[length // 2 :]
    if placement == "end":
        return image + extra * count
    if placement == "double":
        return extra + image + extra
    step = length // (count + 1)
    spread = []
    for index in range(count):
        spread += image[index * step : (index + 1) * step] + extra
    return spread + image[count * step :]


def test_every_placement_is_tested():
    assert {placement for placement, _ in LAYOUTS} == set(PLACEMENTS)


@pytest.mark.parametrize(("placement", "count"), LAYOUTS)
def test_tokens_go_in_and_come_out(placement, count):
    tokens = ExtraTokens(4, placement, count)
    for length in LENGTHS:
        wanted = sequence(placement, count, length)
        positions = tokens.positions(length)
        assert positions == tuple(i for i, token in enumerate(wanted) if token == -1), length
        assert [token for token in wanted if token != -1] == list(range(length))
        x = torch.randn(2, length, 4)
        longer = tokens.insert(x)
        extra = iter(tokens.tokens[0])
        for got, token in zip(longer.unbind(1), wanted, strict=True):
            expected = next(extra).expand(2, -1) if token == -1 else x[:, token]
            assert torch.equal(got, expected), length
        image, out = tokens.extract(longer)
        assert torch.equal(image, x), length
        assert torch.equal(out, tokens.tokens.expand(2, -1, -1)), length
        assert torch.equal(merge_extra(*split_extra(longer, positions), positions), longer), length


@pytest.mark.parametrize(
    ("placement", "count"),
    [("head", 2), ("middle", 1), ("end", 5), ("double", 2), ("even", 3), ("even", 12)],
)
def test_compiled_once_for_any_length(placement, count):
    torch._dynamo.reset()
    tokens, counter = ExtraTokens(4, placement, count), CompileCounter()

    def through(x):
        image, extra = tokens.extract(2 * tokens.insert(x))
        return image.sum(1) + extra.sum(1)

    compiled = torch.compile(through, backend=counter, dynamic=True, fullgraph=True)
    for length in (35, 36, 196):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(compiled(x), through(x))
    assert counter.frame_count == 1


def test_gradients_reach_every_token():
    tokens = ExtraTokens(4, "even", 3, pos_embed=True)
    weights = torch.randn(1, 13, 4)
    (tokens.insert(torch.zeros(2, 10, 4)) * weights).sum().backward()
    wanted = 2 * weights[:, list(tokens.positions(10))]
    torch.testing.assert_close(tokens.tokens.grad, wanted)
    torch.testing.assert_close(tokens.pos_embed.grad, wanted)


def test_learned_positions_are_added_and_do_not_decay():
    plain, placed = ExtraTokens(4, "middle"), ExtraTokens(4, "middle", pos_embed=True)
    assert plain.no_weight_decay() == {"tokens"}
    assert placed.no_weight_decay() == {"tokens", "pos_embed"}
    (_, extra) = placed.extract(placed.insert(torch.randn(2, 6, 4)))
    torch.testing.assert_close(extra, (placed.tokens + placed.pos_embed).expand(2, -1, -1))


def test_default_counts():
    counts = {placement: ExtraTokens(4, placement).tokens.shape[1] for placement in PLACEMENTS}
    assert counts == {"head": 1, "middle": 1, "end": 1, "double": 2, "even": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tail",), r"placement must be one of \['head', 'middle', .* got 'tail'"),
        (("even", 0), "count of 'even' must be at least 1, got 0"),
        (("double", 3), "count of 'double' must be 2, got 3"),
    ],
)
def test_what_there_is_not_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ExtraTokens(4, *arguments)


def test_registers_stand_where_mamba_reg_puts_them():
    tensors = load_file(GOLDEN.with_suffix(".safetensors"))
    arguments = json.loads(GOLDEN.with_suffix(".json").read_text())["config"]["kwargs"]
    count = arguments["num_cls_tokens"]
    length = (arguments["img_size"] // arguments["patch_size"]) ** 2
    positions = ExtraTokens(4, "even", count).positions(length)
    assert positions == tuple(tensors["output.cls_positions"].tolist()) == (4, 9, 14)
    image, registers = torch.arange(length + count).view(1, -1, 1).split((length, count), dim=1)
    order = merge_extra(image, registers, positions).flatten()
    assert torch.equal(order, tensors["output.token_idx"])
