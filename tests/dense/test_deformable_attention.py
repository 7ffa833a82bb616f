"""The layer of deformable attention: its places, its first offsets, and the sum of its samples."""

import pytest
import torch
from transformers.models.deformable_detr.modeling_deformable_detr import (
    MultiScaleDeformableAttention,
)

from tolerances import assert_close
from vision_ttt.dense.deformable_attention import DeformableAttention, centres

GRIDS = [(6, 9), (3, 5)]
TOKENS = 69


def layer(**arguments):
    torch.manual_seed(0)
    chosen = {"heads": 2, "levels": 2, "points": 3, "ratio": 0.5, **arguments}
    return DeformableAttention(32, **chosen)


def test_centres():
    got = centres((2, 4), like=torch.empty(0))
    wanted = [(x, y) for y in (0.25, 0.75) for x in (0.125, 0.375, 0.625, 0.875)]
    assert torch.equal(got, torch.tensor(wanted))
    assert centres((2, 4), like=torch.empty(0, dtype=torch.bfloat16)).dtype == torch.float32


def test_queries_without_offsets_read_their_own_cells():
    attention = layer(levels=1, ratio=1.0)
    torch.nn.init.zeros_(attention.sampling.bias)
    x = torch.randn(2, 54, 32)
    with torch.no_grad():
        got = attention(torch.randn(2, 54, 32), centres((6, 9), like=x), x, [(6, 9)])
        assert_close(got, attention.out(attention.value(x)), 1e-5)


def test_a_fresh_head_looks_in_a_direction_of_its_own():
    offsets = layer(heads=4).sampling.bias[:48].unflatten(0, (4, 2, 3, 2))
    wanted = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
    for length in (1, 2, 3):
        for level in (0, 1):
            assert_close(offsets[:, level, length - 1], length * wanted, 1e-6)


def test_the_sum_of_samples_is_transformers():
    attention = layer()
    with torch.no_grad():
        attention.sampling.weight.normal_(std=0.3)
    queries, tokens = torch.randn(2, 7, 32), torch.randn(2, TOKENS, 32)
    places = torch.rand(7, 2)
    sampling = attention.sampling(queries)
    offsets, logits = sampling[..., :24].view(2, 7, 2, 2, 3, 2), sampling[..., 24:]
    sizes = torch.tensor([[9.0, 6.0], [5.0, 3.0]])
    summed = MultiScaleDeformableAttention()(
        attention.value(tokens).view(2, TOKENS, 2, 8),
        torch.tensor(GRIDS),
        GRIDS,
        torch.tensor([0, 54]),
        places[None, :, None, None, None] + offsets / sizes[:, None],
        logits.view(2, 7, 2, 6).softmax(-1).view(2, 7, 2, 2, 3),
        64,
    )
    assert_close(attention(queries, places, tokens, GRIDS), attention.out(summed), 1e-5)


@pytest.mark.parametrize(("heads", "ratio"), [(5, 1.0), (64, 1.0), (2, 0.01)])
def test_heads_divide_the_values(heads, ratio):
    with pytest.raises(ValueError, match=f"{heads} heads do not divide"):
        layer(heads=heads, ratio=ratio)
