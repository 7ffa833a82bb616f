"""bench dense: backbones with an adapter beside the same backbones alone."""

import dataclasses
from pathlib import Path

import pytest
import torch

from studies.bench import dense
from vision_ttt.bench.contenders import find_contenders
from vision_ttt.bench.machine import describe_run
from vision_ttt.bench.protocol import Settings
from vision_ttt.bench.rows import append_rows, read_rows
from vision_ttt.bench.tables import tabulate
from vision_ttt.errors import UserError

SETTINGS = Settings(torch.device("cpu"), repeats=1, shortest_repeat=0.0)
NAMES = ("vittt_nano_patch4_32", "vittt_nano_patch4_32:for_inference")


@pytest.fixture
def run():
    return describe_run(["vision-ttt", "bench", "dense"], torch.device("cpu"))


def test_rows_of_every_size_and_the_adapters_share(run, tmp_path: Path):
    advanced = []
    contenders = find_contenders(NAMES)
    sizes = [(32, 32), (40, 64)]
    measured = list(dense.measure_dense(contenders, sizes, SETTINGS, run, advance=advanced.append))
    assert len(advanced) == len(contenders) * 2 * len(sizes) * 2
    for rows, (height, width) in zip(measured, sizes, strict=True):
        assert [(row.contender, row.measured) for row in rows] == [
            (name, kind) for name in NAMES for kind in dense.KINDS
        ]
        assert all(row.seconds > 0 and not row.failure for row in rows)
        assert all(row.size == height * width for row in rows)
        assert rows[0].macs > rows[1].macs == rows[3].macs
    rows = measured[1]
    assert "packed_vittt_blocks" in rows[2].kernels
    path = tmp_path / "dense.csv"
    append_rows(path, rows)
    assert read_rows(path) == rows
    assert [line[:3] for line in tabulate(rows).lines[:2]] == [
        [NAMES[0], "with adapter", "64×40"],
        [NAMES[0], "backbone alone", "64×40"],
    ]
    rows = [
        dataclasses.replace(row, seconds=seconds)
        for row, seconds in zip(rows, (4.0, 1.0, 2.0, None), strict=True)
    ]
    assert dense.shares(rows) == [f"{NAMES[0]} at 64×40: the adapter takes 75% of the time"]


def test_a_packed_model_with_other_maps_is_not_timed(run, monkeypatch):
    monkeypatch.setitem(dense.TOLERANCES, torch.float32, 0.0)
    contenders = find_contenders(NAMES)
    (rows,) = dense.measure_dense(contenders, [(32, 32)], SETTINGS, run)
    assert [row.seconds is None for row in rows] == [False, False, True, True]
    assert "of the largest, over 0e+00" in rows[2].failure


def test_only_plain_backbones_are_measured():
    (contender,) = find_contenders(["hvit3_tiny"])
    with pytest.raises(UserError, match="hvit3_tiny"):
        dense.multiply_adds(contender, dense.KINDS[0], (64, 64))
