"""Figures and arrays on disk: formats, the same bytes again, nothing half written."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

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


def test_arrays_come_back_by_name(tmp_path):
    arrays = {"model/image/map": torch.rand(2, 3), "marks": torch.tensor([True, False])}
    path = save_arrays(tmp_path, "found", arrays)
    with np.load(path) as read:
        assert set(read) == set(arrays)
        for name, values in arrays.items():
            assert np.array_equal(read[name], values.numpy())
    with pytest.raises(OSError, match="the folder is gone"):
        save_arrays(tmp_path / "none", "found", arrays)
