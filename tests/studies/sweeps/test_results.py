"""The CSV file, the table and the picture of a sweep's results."""

import csv
import dataclasses
import json
import math

import pytest

from studies.sweeps.curves import curves_figure
from studies.sweeps.definition import Column, Panel, SameSeconds
from studies.sweeps.figure import sweep_figure
from studies.sweeps.linearize import LINEARIZE_FASHION, linearize_figure
from studies.sweeps.norm_figure import norm_figure
from studies.sweeps.pretraining import PRETRAINING_FASHION, pretraining_figure
from studies.sweeps.results import finished, read_results, save_result, write_results
from studies.sweeps.tables import Spread, by_row, changes, markdown, tabulate, values_of
from vision_ttt.errors import UserError
from vision_ttt.recipes import change


def test_csv_gives_back_what_was_written(results, tmp_path):
    path = tmp_path / "new" / "results.csv"
    write_results(path, results)
    assert read_results(path) == results
    text = path.read_text()
    assert text.count("\n") == 5
    assert "c0ffee" in text

    write_results(path, results[:1])  # the file is the last call's, whole
    assert read_results(path) == results[:1]


def test_csv_of_an_earlier_version_has_no_histories(results, tmp_path):
    path = tmp_path / "results.csv"
    write_results(path, results)
    lines = list(csv.DictReader(path.read_text().splitlines()))
    columns = [name for name in lines[0] if name not in ("history", "measures")]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(lines)
    assert read_results(path) == results
    with pytest.raises(UserError, match="row 'a', seed 0, has no history"):
        _ = results[0].curve
    with pytest.raises(UserError, match="row 'a', seed 0, has no measures"):
        _ = results[0].measured


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
    assert finished(change(config, {"initial_weights": "others.safetensors"})) is None
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert finished(sweep.config(sweep.rows[0], 0, tmp_path / "moved")) == result


def test_a_moved_run_with_the_weights_of_another_row_is_finished(make_sweep, make_result, tmp_path):
    sweep = make_sweep(a={}, b={})
    row = dataclasses.replace(sweep.rows[1], start="a")
    config = sweep.config(row, 0, tmp_path / "runs")
    (tmp_path / "runs" / "b" / "seed-0").mkdir(parents=True)
    save_result(config, make_result("b", 0, 1.5, 0.5))
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert finished(sweep.config(row, 0, tmp_path / "moved")) is not None
    assert (
        finished(sweep.config(dataclasses.replace(row, start="b"), 0, tmp_path / "moved")) is None
    )


def test_a_table_names_every_machine_and_its_seeds(make_sweep, make_result):
    results = [make_result("a", seed, 1.0, 0.5) for seed in range(3)]
    other = dataclasses.replace(results[2].run, instruction_set="none", torch="1.0")
    moved = [*results[:2], dataclasses.replace(results[2], run=other)]
    sweep, run = make_sweep(a={}), results[0].run
    own = f"; a processor ({run.instruction_set})"
    assert f"{own}, one thread a run; torch {run.torch}, timm" in markdown(sweep, results)
    assert f"{own} (seed 0, 1) and a processor (none) (seed 2), one" in markdown(sweep, moved)
    assert f"; torch 1.0 and {run.torch}, timm" in markdown(sweep, moved)


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
        "`sweep tiny`, mean ± sample standard deviation over seeds; 3 epochs",
        "published: the paper's own top-1 of a large model",
        "It proves nothing.",
    ):
        assert told in text
    assert "c0ffee" not in text  # commits and commands are in the results' rows


def test_table_has_the_sweeps_own_columns(make_sweep, results):
    columns = (Column("seconds", lambda result: result.seconds, 1),)
    sweep = dataclasses.replace(make_sweep(a={}, b={}), columns=columns)
    headings, (line, _) = tabulate(sweep, results, 0)
    assert headings.index("seconds") == headings.index("seeds") - 1
    assert line[headings.index("seconds")] == "2.5"  # of both seeds


def test_times_on_several_processors_are_listed(make_sweep, results):
    columns = (Column("seconds", lambda result: result.seconds, 1, is_time=True),)
    sweep = dataclasses.replace(make_sweep(a={}, b={}), columns=columns)
    first, *others = results
    other = dataclasses.replace(first.run, device_name="another")
    results = [dataclasses.replace(first, seconds=8.0, run=other), *others]
    headings, (line, _) = tabulate(sweep, results, 0)
    assert line[headings.index("seconds")].startswith("8.0 / 2.5")


def test_a_column_is_relative_to_another_row_seed_by_seed(make_sweep, results):
    column = Column("% of b", lambda result: result.test_loss, 1, relative_to="b")
    sweep = dataclasses.replace(make_sweep(a={}, b={}), columns=(column,))
    headings, lines = tabulate(sweep, [results[0], results[-1]], 0)
    assert [line[headings.index("% of b")] for line in lines] == ["400.0", "100.0"]
    found = by_row(sweep, results)  # b has seed 0 alone
    values = values_of(column, found["a"], found)
    assert values[0] == 400
    assert all(map(math.isnan, values[1:]))
    headings, _ = tabulate(sweep, results[:3], 0)  # without b
    assert "% of b" not in headings


def test_the_picture_of_linear_models_has_a_line_per_kind(make_result):
    def result(row, seed, accuracy, updates, seconds):
        measures = json.dumps({"cpu_seconds_of_an_update": seconds})
        own = make_result(row, seed, 0.3, accuracy, measures=measures)
        history = json.dumps({"update": [updates]})
        return dataclasses.replace(own, sweep="linearize-fashion", history=history)

    rows = [("deit", 0.8, 1000, 0.1), ("swiglu-5", 0.4, 50, 0.2), ("swiglu-20", 0.6, 200, 0.15)]
    figure = linearize_figure(
        LINEARIZE_FASHION, [result(row, seed, *own) for row, *own in rows for seed in (0, 1)]
    )
    drawn = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    assert drawn["SwiGLU, linearised"] == [[10, pytest.approx(50)], [30, pytest.approx(75)]]
    assert "SwiGLU, from scratch" not in drawn


def test_the_picture_of_pre_training_has_a_line_per_kind_by_share_of_labels(make_result):
    rows = [
        ("masked", math.nan),
        ("fine-tuned-1", 0.6),
        ("fine-tuned-100", 0.9),
        ("scratch-1", 0.5),
    ]
    results = [
        make_result(row, seed, 0.3, right + seed / 10, sweep="pretraining-fashion")
        for row, right in rows
        for seed in (0, 1)
    ]
    (axis,) = pretraining_figure(PRETRAINING_FASHION, results).axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
    assert drawn["masked images, fine-tuned"] == [[1, pytest.approx(65)], [100, pytest.approx(95)]]
    assert drawn["from scratch, as long as both"] == [[1, pytest.approx(55)]]


def test_images_of_several_numbers_are_told(make_sweep, make_result):
    results = [
        make_result("a", seed, 1, 1, train_images=count) for seed, count in enumerate((60, 6))
    ]
    assert "epochs of 6 to 60 training images;" in markdown(make_sweep(a={}), results)


def test_lengths_of_several_kinds_are_told(make_sweep, make_result):
    sweep = make_sweep(a={})
    results = [make_result("a", seed, 1, 1, epochs=epochs) for seed, epochs in enumerate((5, 3.25))]
    assert "; 3.25 to 5 epochs of 1,297 training images" in markdown(sweep, results)
    timed = dataclasses.replace(sweep.rows[0], name="b", length=SameSeconds("a"))
    panel = Panel("all", {"a": "a", "b": "b"})
    both = dataclasses.replace(sweep, rows=(*sweep.rows, timed), panels=(panel,))
    assert changes(both, "b") == "seconds=those of a"


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


def test_curves_go_through_the_means_of_every_evaluation(make_sweep, make_result):
    def result(row, seed, scale):
        history = {
            "epoch": [1, 2],
            "update": [10, 20],
            "seconds": [2 * scale, 4 * scale],
            "test_loss": [scale, scale / 2],
            "test_accuracy": [0.5, 1.0],
        }
        return make_result(row, seed, scale / 2, 1.0, history=json.dumps(history))

    sweep = make_sweep(a={}, b={}, without={})
    timed = dataclasses.replace(sweep.rows[1], name="b-seconds", length=SameSeconds("a"))
    epochs, seconds = sweep.panels[0], Panel("equal seconds", {"the a": "a", "the b": "b-seconds"})
    sweep = dataclasses.replace(sweep, rows=(*sweep.rows, timed), panels=(epochs, seconds))
    results = [result("a", 0, 1.0), result("a", 1, 3.0), result("b", 0, 5.0)]
    results += [result("b-seconds", 0, 5.0)]
    figure = curves_figure(sweep, results)
    losses, errors, losses_by_time, errors_by_time = figure.axes
    (a, b), (a_by_time, _) = losses.lines, losses_by_time.lines
    assert (a.get_xdata().tolist(), a.get_ydata().tolist()) == ([1, 2], [2, 1])
    assert b.get_ydata().tolist() == [5, 2.5]
    assert a_by_time.get_xdata().tolist() == [50, 100]
    assert errors.lines[0].get_ydata().tolist() == [50, 0.1]  # half an image of 500, for none
    band = losses.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (0.5, 3)
    assert losses.get_shared_y_axes().joined(losses, losses_by_time)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["the a", "the b"]
    assert errors_by_time.get_xlabel() == "share of equal seconds of training, %"
    loss, error = curves_figure(sweep.only(["equal seconds"]), [*results[:2], results[3]]).axes
    assert loss.get_title() == "equal seconds"
    assert loss.lines[0].get_xdata().tolist() == [50, 100]
    assert error.get_xlabel() == "share of equal seconds of training, %"
    empty = Panel("nothing yet", {"it": "without"})
    more = dataclasses.replace(sweep, panels=(empty, epochs, seconds))
    loss, *_ = curves_figure(more, results).axes
    assert loss.get_title() == epochs.title


def test_norm_figure_has_outliers_blocks_and_maps_of_every_row(make_sweep, make_result):
    def result(row, seed, share):
        measures = {
            "outlier_share": [0.0, share],
            "largest_over_median": [1.5, 1 + share],
            "maps": [[[1.0, 2.0], [0.5, image + seed]] for image in range(4)],
        }
        return make_result(row, seed, 1.0, 0.5, measures=json.dumps(measures))

    results = [result("a", 0, 0.25), result("a", 1, 0.75), result("b", 0, 0.5)]
    figure = norm_figure(make_sweep(a={}, b={}, without={}), results)
    _loss, _error, outliers, blocks, *pictures, bar = figure.axes
    assert [line.get_ydata().tolist() for line in outliers.lines] == [[25, 75], [50], [50, 50]]
    assert [line.get_ydata().tolist() for line in blocks.lines] == [[1.5, 1.5], [1.5, 1.5]]
    assert [axis.get_title() for axis in pictures[:3]] == ["image", "the a", "the b"]
    assert len(pictures) == 4 * 3
    shown = pictures[10].images[0]  # row a of the last image, by its first seed
    assert shown.get_array().tolist() == [[1, 2], [0.5, 3]]
    assert shown.get_clim() == (0, 3)
    assert "median" in bar.get_ylabel()
