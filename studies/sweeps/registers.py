"""Registers of Mamba-Reg on handwritten digits: how many, and where among the image's tokens."""

from __future__ import annotations

from typing import Any

from studies.sweeps import TITLES
from studies.sweeps.definition import Column, Panel, Sweep, Variant
from studies.sweeps.norm_figure import norm_figure
from studies.sweeps.norms import measure_norms
from vision_ttt.explain.token_norms import OUTLIER


def _row(name: str, note: str = "", **arguments: Any) -> Variant:
    return Variant(name, {"arguments": arguments}, note=note)


def _registers(count: int, distribution: str) -> Variant:
    # Each is reduced to D / n, so that the feature is as wide as one token in every row.
    return _row(
        f"{distribution}{count}",
        num_registers=count,
        head_reduction=count,
        distribution=distribution,
    )


_COUNTS = (4, 8)

REGISTERS_DIGITS = Sweep(
    name="registers-digits",
    title=TITLES["registers-digits"],
    recipe="digits",
    base={
        "model": "mambar_nano_patch4_32",
        "epochs": 3,
        "warmup": 0.5,
        "batch_size": 16,
        "learning_rate": 1.5e-3,
    },
    rows=(
        _row("none", distribution="none", note="the feature is the mean of the image's tokens"),
        _row(
            "class_token",
            distribution="middle",
            num_registers=1,
            note="one token is in the middle whether evenly spread or not; the feature is its own",
        ),
        *(_registers(count, place) for count in _COUNTS for place in ("even", "middle")),
    ),
    panels=(
        Panel(
            "tokens beside the image's",
            {
                "none, mean pool": "none",
                "1 class token": "class_token",
                "4 registers, even": "even4",
                "4 registers, in the middle": "middle4",
                "8 registers, even": "even8",
                "8 registers, in the middle": "middle8",
            },
        ),
    ),
    caveat="Small-scale evidence: Mamba-Reg-nano, 64 image tokens, 1,297 training and 500 test "
    "images, three epochs; differences below the spread over seeds mean nothing. Outliers are "
    "image tokens whose norm after the last block exceeds "
    f"{OUTLIER:g} times the median of their image.",
    columns=(
        Column("outliers, %", lambda result: 100 * result.measured["outlier_share"][-1], 2),
        Column(
            "largest / median norm", lambda result: result.measured["largest_over_median"][-1], 2
        ),
    ),
    examine=measure_norms,
    draw=norm_figure,
)
