"""Rows that train for another row's seconds."""

import json
from pathlib import Path

import pytest

from studies.sweeps.definition import SameSeconds, Variant
from studies.sweeps.lengths import LENGTHS_FILE, measure_lengths, of_updates
from vision_ttt.errors import UserError

SLOW = Variant("slow-seconds", {}, length=SameSeconds(seconds="fast", speed="slow"))


@pytest.fixture
def timed(make_result):
    """Rows fast and slow, whose ten updates take 1 and 4 s, the median of three seeds."""

    def result(row, seed, seconds):
        history = json.dumps({"update": [5, 10]})
        return make_result(row, seed, 1.0, 0.5, seconds=seconds, history=history)

    return [
        *(result("fast", seed, seconds) for seed, seconds in enumerate((0.9, 1.0, 5.0))),
        *(result("slow", seed, seconds) for seed, seconds in enumerate((3.0, 4.0, 4.1))),
    ]


def test_a_length_is_the_seconds_over_the_pace(timed, tmp_path):
    lengths = measure_lengths([SLOW], timed, tmp_path)
    expected = {"updates": 2, "seconds": 1.0, "seconds_per_update": 0.4}
    assert lengths == {"slow-seconds": expected}
    assert json.loads((tmp_path / LENGTHS_FILE).read_text()) == lengths


def test_there_is_one_update_at_least(make_result, timed, tmp_path):
    slowest = make_result("slow", 0, 1, 1, seconds=99.0, history='{"update": [10]}')
    lengths = measure_lengths([SLOW], [*timed[:3], slowest], tmp_path)
    assert lengths["slow-seconds"]["updates"] == 1


def test_a_length_is_measured_once(timed, tmp_path):
    first = measure_lengths([SLOW], timed, tmp_path)
    assert measure_lengths([SLOW], timed[3:], tmp_path) == first  # not even looked for


@pytest.mark.parametrize(("kept", "missing"), [(slice(0, 3), "slow"), (slice(3, 6), "fast")])
def test_a_row_that_was_not_trained_is_named(timed, tmp_path, kept, missing):
    with pytest.raises(UserError, match=f"seconds of row '{missing}', which has no finished run"):
        measure_lengths([SLOW], timed[kept], tmp_path)
    assert not (tmp_path / LENGTHS_FILE).exists()


def test_a_damaged_file_is_told(timed, tmp_path):
    (tmp_path / LENGTHS_FILE).write_text("{")
    with pytest.raises(UserError, match=r"is damaged .*; remove it to measure anew"):
        measure_lengths([SLOW], timed, tmp_path)


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
