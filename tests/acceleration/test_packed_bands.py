"""A band of a picture through a sweep of a packed block is its definition, on every backend."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hostile_calls import normal, vector_of
from tolerances import assert_close
from vision_ttt.ops import use_backend
from vision_ttt.ops.packed import (
    mamba_band,
    packed_mamba_band,
    packed_vit3_band,
    packed_vittt_band,
    vit3_band,
    vittt_band,
)

pytestmark = pytest.mark.kernels

DIM = 32
VITTT = vittt_band.VitttBandSizes(
    *{"heads": 2, "directions": 2, "taps": 4, "hidden": 48, "mini_batch_size": 5}.values(),
    *{"kernel": 3, "views": 2, "gated": 1, "is_mlp": 0, "is_bfloat16": 0}.values(),
    *{"reverse": 0, "merges": 1}.values(),
)
BANDS = ((4, 7, 1, 1, 3), (9, 11, 0, 2, 0), (3, 1, 1, 1, 2), (1, 1, 0, 0, 4))
"""Rows, their width, those above and below the band's, tokens of the open mini-batch."""


def side_of(width: int, count: int, halves: bool) -> torch.Tensor:
    side = normal(1, count, width)
    return side.bfloat16() if halves else side


def vittt(band: tuple[int, ...], **changes: int) -> tuple[Any, Any]:
    sizes, (rows, width, above, below, _) = VITTT._replace(**changes), band
    side = None
    if sizes.directions == 2 and sizes.merges:
        side = side_of(DIM, (rows - above - below) * width, sizes.is_bfloat16)
    state = normal(len(vittt_band.initial_state([normal(2, 16, 17)], DIM, sizes)))
    weights, y = vector_of(vittt_band.BLOCK, DIM, sizes), normal(1, rows * width, DIM)
    numbers = (*band, *sizes), (1 / 16, *[1e-3] * 4)
    # As the kernels leave it.
    state = state.bfloat16().float() if sizes.is_bfloat16 else state
    return vittt_band.OP, vittt_band.Inputs(y, weights, state, side, *numbers)


def vit3(band: tuple[int, ...], learns: bool, is_bfloat16: int) -> tuple[Any, Any]:
    sizes = vit3_band.Vit3BlockSizes(2, 48, 0, 0, 0, is_bfloat16)
    sums = None if learns else normal(2 * 2 * 16 * 16 + 9 * 16)
    weights, y = vector_of(vit3_band.BLOCK, DIM, sizes), normal(1, band[0] * band[1], DIM)
    numbers = (*band[:4], 99, *sizes), (0.3, 1e-3, 1e-3)
    return vit3_band.OP, vit3_band.Inputs(y, weights, sums, *numbers)


def mamba(band: tuple[int, ...], reverse: int, merges: int, is_bfloat16: int) -> tuple[Any, Any]:
    sizes, count = mamba_band.MambaBlockSizes(48, 4, 6, is_bfloat16), band[0] * band[1]
    weights, y = vector_of(mamba_band.BLOCK, DIM, sizes), normal(1, count, DIM)
    state = normal(mamba_band.state_numbers(sizes))
    state = state.bfloat16().float() if is_bfloat16 else state
    side = side_of(48, count, is_bfloat16) if merges else None
    numbers = (reverse, merges, *sizes), 1e-3
    return mamba_band.OP, mamba_band.Inputs(y, weights, state, side, *numbers)


CASES = {
    "forth": lambda band: vittt(band),
    "back": lambda band: vittt(band, reverse=1, is_bfloat16=1, mini_batch_size=16),
    "a scan alone": lambda band: vittt(band, reverse=1, merges=0, gated=0),
    "one way": lambda band: vittt(band, directions=1, views=3, is_bfloat16=1),
    "bare": lambda band: vittt(band, directions=1, taps=0, kernel=0, gated=0, reverse=1),
    "with TTT-MLP": lambda band: vittt(band, is_mlp=1, merges=0, is_bfloat16=1),
    "vit3 learns": lambda band: vit3(band, True, 0),
    "vit3 answers": lambda band: vit3(band, False, 0),
    "vit3 learns, bfloat16": lambda band: vit3(band, True, 1),
    "vit3 answers, bfloat16": lambda band: vit3(band, False, 1),
    "mamba forth": lambda band: mamba(band, 0, 1, 0),
    "mamba back": lambda band: mamba(band, 1, 1, 1),
    "mamba's scan alone": lambda band: mamba(band, 1, 0, 0),
    "mamba's scan alone, bfloat16": lambda band: mamba(band, 0, 0, 1),
}


def made(name: str, band: tuple[int, ...]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return CASES[name](band)


def results(out: Any) -> list[torch.Tensor]:
    return [out] if isinstance(out, torch.Tensor) else list(out)


@pytest.mark.parametrize("name", CASES)
def test_it_is_its_definition(name: str) -> None:
    for band in BANDS:
        op, given = made(name, band)
        wanted = results(op.definition(given))
        with use_backend("reference"):
            in_parts = results(op(given))
        found = results(op(given)), in_parts, results(op.forward_op(*given))
        for each in found:
            for got, exact in zip(each, wanted, strict=True):
                assert got.dtype == exact.dtype
                halves = torch.bfloat16 in (x.dtype for x in wanted) or "back" in name
                halves = halves or "bfloat16" in name or name == "one way"
                assert_close(got, exact, 1e-2 if halves else 1e-5, f"{band}")
        for got, fake in zip(wanted, results(op.fake(given)), strict=True):
            assert (got.shape, got.dtype) == (fake.shape, fake.dtype)


@pytest.mark.parametrize("name", ["back", "vit3 answers", "mamba back"])
@pytest.mark.parametrize("isa", ["baseline", "avx512bf16"])
def test_other_instruction_sets(isa: str, name: str, load_kernels: Any) -> None:
    load_kernels(isa)
    op, given = made(name, BANDS[0])
    for got, wanted in zip(results(op(given)), results(op.definition(given)), strict=True):
        assert_close(got, wanted, 1e-2)


@pytest.mark.parametrize("name", ["back", "vit3 learns", "vit3 answers", "mamba back"])
def test_threads(name: str) -> None:
    op, given = made(name, (31, 14, 1, 1, 2))
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(results(op(given)))
            for x, again in zip(found[-1], results(op(given)), strict=True):
                assert torch.equal(x, again)
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
            assert_close(x, y, 1e-5)


@pytest.mark.parametrize("name", ["forth", "vit3 learns", "vit3 answers", "mamba forth"])
def test_its_flops_grow_with_the_bands_tokens(name: str) -> None:
    def flops(*band: int) -> int:
        op, given = made(name, band)
        with FlopCounterMode(display=False) as counter:
            op(given)
        return counter.get_total_flops()

    assert flops(3, 10, 0, 0, 0) == 3 * flops(1, 10, 0, 0, 0) > 3 * 2 * 10 * 2 * DIM * DIM


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
def test_what_does_not_fit_vittt_is_refused(changes: dict[str, Any], message: str) -> None:
    _, (y, weights, state, side, *_) = made("forth", BANDS[0])
    given = {"y": y, "weights": weights, "state": state, "side": side, "sizes": VITTT}
    given |= {"rows": (7, 1, 1), "open_tokens": 3, "rate": 0.1, "eps": (1e-3,) * 4}
    assert packed_vittt_band(**given)[0].shape == (1, 14, DIM)
    with pytest.raises(ValueError, match=message):
        packed_vittt_band(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": normal(2, 28, DIM)}, r"y must be \[1, 4 x 7, D\], got \[2, 28, 32\]"),
        ({"rows": (7, 2, 2)}, "of 4 rows 2 and 2 are around"),
        ({"rows": (7, 3, 0)}, r"above must be in 0 … 2, got 3"),
        ({"sums": normal(9)}, r"sums must have \d+ numbers, got 9"),
        ({"sizes": vit3_band.Vit3BlockSizes(2, 48, 0, 1, 0, 0)}, "the MLP must not convolve"),
    ],
)
def test_what_does_not_fit_vit3_is_refused(changes: dict[str, Any], message: str) -> None:
    _, (y, weights, sums, *_) = made("vit3 answers", BANDS[0])
    given = {"y": y, "weights": weights, "sums": sums, "rows": (7, 1, 1), "total": 99}
    given |= {"sizes": vit3_band.Vit3BlockSizes(2, 48, 0, 0, 0, 0)}
    given |= {"loss_scale": 0.3, "eps": (1e-3,) * 2}
    assert packed_vit3_band(**given).shape == (1, 14, DIM)
    with pytest.raises(ValueError, match=message):
        packed_vit3_band(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"y": normal(2, 28, DIM), "side": normal(2, 28, 48)},
            r"y must be \[1, T, 32\] of T > 0 tokens, got \[2, 28, 32\]",
        ),
        ({"y": normal(1, 0, DIM), "side": normal(1, 0, 48)}, "of T > 0 tokens"),
        ({"state": normal(9)}, r"state must have \d+ numbers, got 9"),
        ({"side": normal(1, 28, 32)}, r"side must be \[1, 28, 48\] in torch.float32, got \[1, 28"),
        ({"side": normal(1, 28, 48).bfloat16()}, "side must be .* in torch.bfloat16"),
    ],
)
def test_what_does_not_fit_mamba_is_refused(changes: dict[str, Any], message: str) -> None:
    _, (y, weights, state, side, *_) = made("mamba forth", BANDS[0])
    given = {"y": y, "weights": weights, "state": state, "side": side, "reverse": False}
    given |= {"sizes": mamba_band.MambaBlockSizes(48, 4, 6, 0), "eps": 1e-3}
    assert packed_mamba_band(**given)[0].shape == (1, 28, DIM)
    with pytest.raises(ValueError, match=message):
        packed_mamba_band(**{**given, **changes})
