"""The rows of a figure, its lines, and how time grows along them."""

import dataclasses
import itertools

import pytest

from bench_rows import DEIT, MODEL, OP, RUN, VITTT, timed
from studies.bench.figures import chosen_lines, cost_figure
from studies.bench.fits import exponents
from studies.bench.selection import comparable, newest
from vision_ttt.bench.rows import Row

PIXELS = "pixels along a side"


def test_newest_row_of_each_settings():
    later = dataclasses.replace(MODEL, seconds=0.05, run=dataclasses.replace(RUN, started="later"))
    other = dataclasses.replace(MODEL, dtype="bfloat16")
    assert newest([MODEL, other, later]) == [other, later]
    for change in ({"case": "another"}, {"autocast": True}):
        apart = dataclasses.replace(MODEL, **change)
        assert newest([MODEL, apart]) == [MODEL, apart]


def test_rows_of_one_figure():
    """Those at the most sizes, else those in the last row's circumstances."""
    other = dataclasses.replace(MODEL, dtype="bfloat16")
    larger = dataclasses.replace(MODEL, resolution=2 * MODEL.resolution)
    assert comparable([MODEL, other]) == [other]
    assert comparable([MODEL, other, MODEL]) == [MODEL, MODEL]
    assert comparable([MODEL, larger, other, other]) == [MODEL, larger]


def test_exponents():
    rows = [
        dataclasses.replace(MODEL, resolution=side, seconds=1e-6 * side**3) for side in (10, 20, 40)
    ]
    rows.append(dataclasses.replace(MODEL, resolution=80, seconds=None, failure="out of memory"))
    # Tokens grow as side².
    assert exponents(rows) == {MODEL.contender: (pytest.approx(1.5), 10, 40, PIXELS)}
    assert exponents([MODEL]) == {}
    rows[0] = dataclasses.replace(rows[0], seconds=1.0)
    fit = exponents(rows, (20, 100))[MODEL.contender]
    assert fit == (pytest.approx(1.5), 20, 40, PIXELS)
    assert fit.sentence("a") == "a: time ~ tokens^1.500 between 20 and 40 pixels along a side"
    ops = [dataclasses.replace(OP, tokens=n, seconds=n**2) for n in (10, 20, 30)]
    assert exponents(ops, (10, 20)) == {"cpu, forward": (pytest.approx(2), 10, 20, "tokens")}


@pytest.mark.parametrize(("row", "panels"), [(MODEL, 2), (OP, 1)])
def test_figure_has_a_labelled_line_per_contender_on_log_axes(row: Row, panels: int):
    double = {"resolution": 448} if row.tokens is None else {"tokens": 12800}
    rows = [row, dataclasses.replace(row, **double)]
    rows += [dataclasses.replace(each, contender="b") for each in rows]
    rows[3] = dataclasses.replace(rows[3], seconds=None, failure="out of memory")
    rows.append(dataclasses.replace(row, contender="a single point"))
    figure = cost_figure(chosen_lines(rows))
    assert len(figure.axes) == panels  # memory only where it was measured
    assert not figure.legends
    for axis in figure.axes:
        assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
        assert [len(line.get_xdata()) for line in axis.lines] == [2, 2]
        assert sorted(text.get_text() for text in axis.texts) == sorted(chosen_lines(rows))
    figure.draw_without_rendering()
    with pytest.raises(ValueError, match="must be rows to draw"):
        chosen_lines([])


def test_labels_of_a_picture_do_not_cover_each_other():
    rows = [
        dataclasses.replace(MODEL, contender=name, resolution=side, seconds=seconds)
        for name, seconds in {"a": 1.0, "b": 1.001, "c": 1.002}.items()
        for side in (224, 448)
    ]
    figure = cost_figure(chosen_lines(rows))
    figure.draw_without_rendering()
    for axis in figure.axes:
        boxes = sorted((text.get_window_extent() for text in axis.texts), key=lambda box: box.y0)
        assert all(low.y1 <= high.y0 for low, high in itertools.pairwise(boxes))


def test_lines_of_a_picture():
    names = [f"{DEIT}:{runtime}" for runtime in "abcdefg"]
    rows = [
        timed(name, seconds, resolution=side)
        for seconds, name in enumerate([*names[::-1], "deit_base_patch16_224", VITTT], start=1)
        for side in (224, 448)
    ]
    single = timed("vittt_tiny_patch16_224:for_inference", 0.1)
    lines = chosen_lines([*rows, single])
    assert list(lines) == names[:0:-1]  # the fastest six of those that are lines, of one size
    assert list(chosen_lines(rows, [VITTT, names[0]])) == [names[0], VITTT]
    assert list(chosen_lines([single])) == [single.contender]
    with pytest.raises(ValueError, match="6 lines at most, got 7"):
        chosen_lines(rows, names)
