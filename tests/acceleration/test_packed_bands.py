"""A band of a picture through a packed block's scan is its definition, on every backend."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hostile_calls import normal, vector_of
from tolerances import assert_close
from vision_ttt.ops import use_backend
from vision_ttt.ops.packed import packed_vittt_band
from vision_ttt.ops.packed.vittt_band import BLOCK, OP, Inputs, VitttBandSizes, initial_state

pytestmark = pytest.mark.kernels

DIM = 32
SIZES = VitttBandSizes(
    *{"heads": 2, "directions": 2, "taps": 4, "hidden": 48, "mini_batch_size": 5}.values(),
    *{"kernel": 3, "views": 2, "gated": 1, "is_mlp": 0, "is_bfloat16": 0}.values(),
    *{"reverse": 0, "merges": 1}.values(),
)
CASES = {
    "forth": {},
    "back": {"reverse": 1, "is_bfloat16": 1, "mini_batch_size": 16},
    "a scan alone": {"reverse": 1, "merges": 0, "gated": 0},
    "one way": {"directions": 1, "views": 3, "is_bfloat16": 1},
    "bare": {"directions": 1, "taps": 0, "kernel": 0, "gated": 0, "reverse": 1},
    "with TTT-MLP": {"is_mlp": 1, "merges": 0, "is_bfloat16": 1},
}
BANDS = ((4, 7, 1, 1, 3), (9, 11, 0, 2, 0), (3, 1, 1, 1, 2), (1, 1, 0, 0, 4))
"""Rows, their width, those above and below the band's, tokens of the open mini-batch."""


def make(band, **changes) -> Inputs:
    torch.manual_seed(0)
    sizes, (rows, width, above, below, _) = SIZES._replace(**changes), band
    weights = vector_of(BLOCK, DIM, sizes)
    state = normal(len(initial_state([normal(2, 16, 17)], DIM, sizes)))
    side = None
    if sizes.directions == 2 and sizes.merges:
        side = normal(1, (rows - above - below) * width, DIM)
    if sizes.is_bfloat16:  # as the kernels leave it
        state = state.bfloat16().float()
        side = None if side is None else side.bfloat16()
    y = normal(1, rows * width, DIM)
    return Inputs(y, weights, state, side, (*band, *sizes), (1 / 16, *[1e-3] * 4))


@pytest.mark.parametrize("name", CASES)
def test_it_is_its_definition(name):
    for band in BANDS:
        given = make(band, **CASES[name])
        halves = given.ints[-3]
        for got, wanted in zip(OP(given), OP.definition(given), strict=True):
            assert got.dtype == wanted.dtype
            assert_close(got, wanted, 1e-2 if halves else 1e-5, f"{band}")
        with use_backend("reference"):
            for got, wanted in zip(OP(given), OP.definition(given), strict=True):
                assert_close(got, wanted, 1e-2 if halves else 1e-5, f"{band}")
        for got, fake in zip(OP.forward_op(*given), OP.fake(given), strict=True):
            assert (got.shape, got.dtype) == (fake.shape, fake.dtype)


@pytest.mark.parametrize("isa", ["baseline", "avx512bf16"])
def test_other_instruction_sets(isa, load_kernels):
    load_kernels(isa)
    given = make(BANDS[0], **CASES["back"])
    for got, wanted in zip(OP(given), OP.definition(given), strict=True):
        assert_close(got, wanted, 1e-2)


def test_its_flops_are_those_of_the_bands_tokens():
    def flops(*band: int) -> int:
        with FlopCounterMode(display=False) as counter:
            OP(make(band))
        return counter.get_total_flops()

    assert flops(3, 10, 1, 1, 0) > 2 * 10 * 4 * DIM * DIM
    assert flops(3, 10, 1, 1, 0) == flops(1, 10, 0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": normal(2, 28, DIM)}, "bands are of one picture"),
        ({"y": normal(1, 27, DIM)}, "27 tokens do not fill 3 x 7"),
        ({"rows": (7, 2, 2)}, "of 4 rows 2 and 2 are around"),
        ({"open_tokens": 5}, "open must be below the mini-batch size 5, got 5"),
        ({"state": normal(9)}, r"state must have \d+ numbers, got 9"),
        ({"side": None}, "side must be given where two directions are merged"),
        ({"side": normal(1, 13, DIM)}, r"side must be \[1, 14, 32\] in torch.float32, got \[1, 13"),
        ({"side": normal(1, 14, DIM).bfloat16()}, "side must be .* in torch.bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    y, weights, state, side, *_ = make(BANDS[0])
    given = {"y": y, "weights": weights, "state": state, "side": side, "sizes": SIZES}
    numbers = {"rows": (7, 1, 1), "open_tokens": 3, "rate": 0.1, "eps": (1e-3,) * 4}
    assert packed_vittt_band(**given, **numbers)[0].shape == (1, 14, DIM)
    with pytest.raises(ValueError, match=message):
        packed_vittt_band(**{**given, **numbers, **changes})
