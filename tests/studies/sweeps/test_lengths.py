"""Rows that train for another row's seconds."""

import json
from pathlib import Path

import pytest

from studies.sweeps import lengths
from studies.sweeps.lengths import LENGTHS_FILE, lengths_by_pace, of_updates
from vision_ttt.errors import UserError

OTHERS = {"slow-seconds": "fast"}
ROWS = {"slow-seconds": None, "fast": None}


@pytest.fixture
def measured(monkeypatch):
    """The rows whose paces were measured, fast and slow-seconds in turns."""
    calls = []

    def measure(configs):
        calls.append(list(configs))
        return {name: {"fast": 0.1, "slow-seconds": 0.4}[name] for name in configs}

    monkeypatch.setattr(lengths, "measure_paces", measure)
    return calls


@pytest.fixture
def trained(make_result):
    """A result of eleven updates of the row fast, in seconds that something else made longer."""
    return [make_result("fast", 0, 1.0, 0.5, seconds=99.0, history=json.dumps({"update": [5, 11]}))]


def test_a_length_is_the_seconds_over_the_pace(trained, measured, tmp_path):
    found = lengths_by_pace(ROWS, OTHERS, tmp_path, trained)
    expected = {"updates": 3, "seconds": pytest.approx(1.1), "seconds_per_update": 0.4}
    assert found == {"slow-seconds": expected}
    assert json.loads((tmp_path / LENGTHS_FILE).read_text()) == found


def test_there_is_one_update_at_least(make_result, measured, tmp_path):
    short = [make_result("fast", 0, 1.0, 0.5, history=json.dumps({"update": [1]}))]
    assert lengths_by_pace(ROWS, OTHERS, tmp_path, short)["slow-seconds"]["updates"] == 1


def test_a_length_is_measured_once(trained, measured, tmp_path):
    first = lengths_by_pace(ROWS, OTHERS, tmp_path, trained)
    assert lengths_by_pace(ROWS, OTHERS, tmp_path, trained) == first
    assert measured == [["slow-seconds", "fast"]]


def test_a_row_with_results_is_as_long_as_they_are(trained, make_result, measured, tmp_path):
    own = make_result("slow-seconds", 0, 1.0, 0.5, history=json.dumps({"update": [3]}))
    (tmp_path / LENGTHS_FILE).write_text('{"slow-seconds": {"updates": 5}}')
    found = lengths_by_pace(ROWS, OTHERS, tmp_path, [*trained, own])
    assert found["slow-seconds"]["updates"] == 3
    assert not measured


def test_a_row_that_was_not_trained_is_named(measured, tmp_path):
    with pytest.raises(UserError, match="seconds of row 'fast', which has no finished run"):
        lengths_by_pace(ROWS, OTHERS, tmp_path, [])
    assert not (tmp_path / LENGTHS_FILE).exists()


def test_a_damaged_file_is_told(trained, tmp_path):
    (tmp_path / LENGTHS_FILE).write_text("{")
    with pytest.raises(UserError, match=r"is damaged .*; remove it to measure anew"):
        lengths_by_pace(ROWS, OTHERS, tmp_path, trained)


def test_the_warm_up_keeps_its_share(make_sweep):
    sweep = make_sweep(a={"epochs": 4, "warmup": 1})
    config = sweep.config(sweep.rows[0], 0, Path("runs"))
    assert of_updates(50, config) == {"updates": 50, "warmup": 12.5}


@pytest.mark.parametrize(("length", "every"), [({"epochs": 4}, None), ({"updates": 20}, 25)])
def test_evaluations_keep_their_number_where_their_interval_has_the_unit_of_the_length(
    make_sweep, length, every
):
    sweep = make_sweep(a={**length, "evaluate_every": 10})
    config = sweep.config(sweep.rows[0], 0, Path("runs"))
    assert of_updates(50, config).get("evaluate_every") == every
