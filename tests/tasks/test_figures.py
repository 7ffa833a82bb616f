"""Curves over epochs, bars of classes, sheets of pictures, as several reports have them."""

import numpy as np
from PIL import Image

from vision_ttt.tasks.figures import Curves, class_bars, learning_curves
from vision_ttt.tasks.images.pictures import picture_rows


def test_curves_show_the_history():
    history = [{"epoch": epoch, "loss": 1 / epoch, "share": 0.1 * epoch} for epoch in (1, 2, 3)]
    panels = [Curves("Loss", "nats", {"loss": "training"}), Curves("x", "%", {"share": "y"}, 100)]
    first, second = learning_curves(history, panels).axes
    assert list(first.lines[0].get_ydata()) == [1, 1 / 2, 1 / 3]
    assert np.allclose(second.lines[0].get_ydata(), [10, 20, 30])
    wide, narrow = (learning_curves(history, panels, narrow=n) for n in (False, True))
    assert narrow.get_figwidth() < wide.get_figwidth()


def test_bars_are_of_the_classes_that_have_a_value_the_best_first():
    shares = {"box": [0.2, None, 0.9], "mask": [0.3, None, 0.8]}
    (axis,) = class_bars(["a", "b", "c"], shares, "AP, %").axes
    assert [text.get_text() for text in axis.get_yticklabels()] == ["c", "a"]
    widths = [[bar.get_width() for bar in bars] for bars in axis.containers]
    assert np.allclose(widths, [[90, 20], [80, 30]])
    names = [str(number) for number in range(50)]
    many = {"IoU": np.linspace(0, 1, 50).tolist()}
    assert len(class_bars(names, many, "IoU, %").axes) == 2
    assert len(class_bars(names, many, "IoU, %", narrow=True).axes) == 1


def test_pictures_lie_in_rows_below_their_headings():
    rows = [[Image.new("RGB", (40, 20), c) for c in row] for row in (("red", "blue"), ("red",) * 2)]
    sheet = picture_rows(rows, ("one", "two"))
    assert sheet.size == (86, 24 + 20 + 6 + 20)
    assert sheet.getpixel((0, 24)) == (255, 0, 0)
    assert sheet.getpixel((46, 24)) == (0, 0, 255)
    assert sheet.getpixel((43, 24)) == (255, 255, 255)


def test_a_loss_that_no_update_had_leaves_a_gap():
    history = [{"epoch": 1, "loss": None}, {"epoch": 2, "loss": 0.5}]
    (axis,) = learning_curves(history, [Curves("Loss", "nats", {"loss": "training"}, 2)]).axes
    assert np.array_equal(axis.lines[0].get_ydata(), [np.nan, 1], equal_nan=True)
