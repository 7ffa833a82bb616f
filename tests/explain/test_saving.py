"""Figures and arrays on disk: formats, the same bytes again, nothing half written."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from vision_ttt.explain.report import png_bytes
from vision_ttt.explain.saving import save_arrays, save_figure


def drawn():
    figure = Figure(figsize=(2, 1))
    figure.add_artist(Line2D([0, 1], [0, 1]))
    return figure


def test_a_figure_has_three_formats_and_no_date(tmp_path):
    files = save_figure(drawn(), tmp_path, "a.b")
    assert [file.name for file in files] == ["a.b.pdf", "a.b.svg", "a.b.png"]
    first = [file.read_bytes() for file in files]
    assert first[0].startswith(b"%PDF")
    assert b"<svg" in first[1]
    with Image.open(files[2]) as picture:
        assert picture.size == (400, 200)
    assert [file.read_bytes() for file in save_figure(drawn(), tmp_path, "a.b")] == first
    assert len(list(tmp_path.iterdir())) == 3


def test_a_dollar_in_a_name_begins_no_formula(tmp_path):
    """Classes are at ticks, pictures above their panels; 10² at a logarithmic axis is a formula."""

    def panel(names):
        figure = Figure()
        axis = figure.subplots()
        axis.set(xscale="log", xlim=(1, 1000), title=names[0])
        axis.set_yticks([0, 1], names)
        axis.plot([0, 1], label=names[0])
        axis.legend()
        return figure

    figure = panel([r"$\wrong$", "a$b$c"])
    save_figure(figure, tmp_path, "a")
    axis = figure.axes[0]
    own = [axis.title, *axis.get_yticklabels(), axis.get_legend().get_texts()[0]]
    assert not any(text.get_parse_math() for text in own)
    assert all(text.get_parse_math() for text in axis.get_xticklabels())
    assert png_bytes(panel([r"$\wrong$", "a$b$c"]))


def test_arrays_come_back_by_name(tmp_path):
    arrays = {"model/image/map": torch.rand(2, 3), "marks": torch.tensor([True, False])}
    path = save_arrays(tmp_path, "found", arrays)
    with np.load(path) as read:
        assert set(read) == set(arrays)
        for name, values in arrays.items():
            assert np.array_equal(read[name], values.numpy())
    with pytest.raises(OSError, match="the folder is gone"):
        save_arrays(tmp_path / "none", "found", arrays)
