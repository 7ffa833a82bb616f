"""`vision-ttt models`."""

import json

import pytest

from vision_ttt.cli.main import main


def test_table_names_every_model_whole_on_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["models", "vittt_tiny_[mp]*"]) == 0
    table = capsys.readouterr().out
    for name in ("max_pool_", "middle_token_", ""):
        assert f"vittt_tiny_{name}patch16_224" in table
    row = next(line for line in table.splitlines() if " vittt_tiny_patch16_224 " in line)
    for figure in ("6,980,080", "6.98M", "1.459G", "1.44G", "77.7"):
        assert figure in row


def test_json(capsys):
    assert main(["models", "vittt_small*", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["name"] == "vittt_small_patch16_224"
    assert row["parameters"] == 26_372_728
    assert row["macs"] == pytest.approx(5.318e9, rel=0.01)
    assert row["paper"]["accuracy"] == 81.8


def test_no_match_names_the_nearest(capsys):
    assert main(["models", "vitt_small"]) == 2
    assert "vittt_small_patch16_224" in capsys.readouterr().err
