"""The CSV file, the table and the picture of a sweep's results."""

import math

import pytest

from vision_ttt.errors import UserError
from vision_ttt.recipes import change
from vision_ttt.sweeps.figure import sweep_figure
from vision_ttt.sweeps.results import finished, read_results, save_result, write_results
from vision_ttt.sweeps.tables import Spread, changes, markdown, tabulate


def test_csv_gives_back_what_was_written(results, tmp_path):
    path = tmp_path / "new" / "results.csv"
    write_results(path, results)
    assert read_results(path) == results
    text = path.read_text()
    assert text.count("\n") == 5
    assert "c0ffee" in text

    write_results(path, results[:1])  # the file is the last call's, whole
    assert read_results(path) == results[:1]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text.replace("test_loss,", "loss,"), "its columns are"),
        (lambda text: text.replace(",1297,", ",many,"), "line 2: invalid literal"),
        (lambda text: text.replace(",1297,", ",", 1), "line 2: not"),
    ],
)
def test_csv_that_is_none_is_named(results, tmp_path, spoil, message):
    path = tmp_path / "results.csv"
    write_results(path, results[:1])
    path.write_text(spoil(path.read_text()))
    with pytest.raises(UserError, match=message):
        read_results(path)


def test_a_run_is_finished_where_its_result_is_of_the_same_config(
    make_sweep, make_result, tmp_path
):
    sweep = make_sweep(a={})
    config = sweep.config(sweep.rows[0], 0, tmp_path / "runs")
    assert finished(config) is None
    result = make_result("a", 0, 1.5, 0.5)
    (tmp_path / "runs" / "a" / "seed-0").mkdir(parents=True)
    save_result(config, result)
    assert finished(config) == result
    assert finished(change(config, {"epochs": 2})) is None
    assert finished(change(config, {"output": str(tmp_path)})) is None
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert finished(sweep.config(sweep.rows[0], 0, tmp_path / "moved")) == result


def test_mean_and_sample_deviation():
    assert Spread.of([1.0, 2.0, 6.0]) == Spread(3.0, math.sqrt(7))
    assert Spread.of([1.0, 2.0, 6.0]).text(2) == "3.00 ± 2.65"
    assert Spread.of([0.5]) == Spread(0.5, None)
    assert Spread.of([0.5]).text(1) == "0.5"


def test_table_has_mean_and_spread_beside_the_published_figure(make_sweep, results):
    sweep = make_sweep(b={}, a={"arguments": {"depth": 1, "x": "y"}}, without={})
    headings, lines = tabulate(sweep, results, 0)
    table = [dict(zip(headings, line, strict=True)) for line in lines]
    assert [line["row"] for line in table] == ["b", "a"]  # the panel's order
    assert table[1]["all"] == "the a"
    assert table[1]["test loss"] == "2.000 ± 1.000"
    assert table[1]["test accuracy, %"] == "60.0 ± 10.0"
    assert table[1]["seeds"] == "0, 1, 2"
    assert table[1]["published"] == "70.5"
    assert (table[1]["parameters"], table[1]["MACs"]) == ("1,234", "5.6M")
    assert table[0]["test accuracy, %"] == "100.0"
    assert changes(sweep, "a") == "depth=1, x=y"
    assert changes(sweep, "b") == "nothing"

    text = markdown(sweep, results)
    assert "| the a | a | 1,234 | 5.6M | 2.000 ± 1.000 | 60.0 ± 10.0 |" in text
    for told in (
        "`vision-ttt sweep tiny`: mean ± sample standard deviation over seeds; 3 epochs",
        "published: the paper's own top-1 of a large model",
        "commit c0ffee",
        "It proves nothing.",
    ):
        assert told in text


def test_results_of_another_sweep_or_twice_are_refused(make_sweep, make_result, results):
    sweep = make_sweep(a={}, b={})
    with pytest.raises(UserError, match="no results"):
        tabulate(sweep, [], 0)
    with pytest.raises(UserError, match="'c' of sweep 'tiny' is not of tiny"):
        tabulate(sweep, [*results, make_result("c", 0, 1, 1)], 0)
    with pytest.raises(UserError, match="of sweep 'other' is not of tiny"):
        tabulate(sweep, [make_result("a", 0, 1, 1, sweep="other")], 0)
    with pytest.raises(UserError, match="'b' has two results with seed 0"):
        tabulate(sweep, [*results, make_result("b", 0, 1, 1)], 0)


def test_figure_has_every_seed_as_a_point_and_the_means_as_a_line(make_sweep, results):
    figure = sweep_figure(make_sweep(a={}, b={}, without={}), results)
    loss, error = figure.axes
    points_a, points_b, means = loss.lines
    assert points_a.get_ydata().tolist() == [1, 2, 3]
    assert points_b.get_ydata().tolist() == [0.25]
    assert means.get_ydata().tolist() == [2, 0.25]
    assert [label.get_text() for label in loss.get_xticklabels()] == ["the a", "the b"]
    assert error.lines[0].get_ydata() == pytest.approx([50, 40, 30])
    assert error.lines[1].get_ydata().tolist() == [0.1]  # half an image of 500, for none
    assert loss.get_title() == "all"
    assert "It proves nothing." in figure.get_suptitle()
    for axis in (loss, error):
        low, high = axis.get_ylim()
        heights = [height for line in axis.lines for height in line.get_ydata()]
        assert low < min(heights)
        assert max(heights) < high
