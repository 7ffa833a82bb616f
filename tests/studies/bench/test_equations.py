"""Eqs. 13 and 14 beside what is counted."""

import pytest

from studies.bench.equations import equation_rows
from studies.main import main


def test_the_equations_agree_with_what_runs():
    rows = {(row.model, row.pixels): row for row in equation_rows(["tiny"], [224, 1280])}
    for (model, _), row in rows.items():
        # A scan counts fewer operations here than in Eq. 13, which has no convolutions.
        tolerance = {"ViT-tiny": 0, "Vim-tiny": 0.07, "Vittt-tiny": 0.02}[model]
        assert row.counted_macs == pytest.approx(row.macs, rel=tolerance)
        assert 1 < row.saved_numbers / row.numbers < 6
    saving = 1 - rows["Vittt-tiny", 1280].macs / rows["ViT-tiny", 1280].macs
    assert saving == pytest.approx(0.882, abs=1e-3)  # of the mixers; the paper's 79.4 % has MLPs
    for model, growth in (("ViT-tiny", 500), ("Vim-tiny", 35), ("Vittt-tiny", 35)):
        small, large = rows[model, 224], rows[model, 1280]
        assert large.numbers / small.numbers == pytest.approx(growth, rel=0.15)
        assert large.saved_numbers / small.saved_numbers == pytest.approx(growth, rel=0.25)


def test_the_command(capsys):
    assert main(["equations", "--resolutions", "224"]) == 0
    shown = capsys.readouterr().out
    assert "Vittt-tiny" in shown
    assert "0.060G" in shown
    assert main(["equations", "--resolutions", "225"]) == 2
    assert "multiples of 16" in capsys.readouterr().err
