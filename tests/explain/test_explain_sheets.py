"""Sheets of maps, inner losses and fast weights: what is drawn where, and how it is labelled."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from vision_ttt.cli.explained.kind import Subject, head_names
from vision_ttt.explain import map_figures
from vision_ttt.explain.fast_weight_figures import fast_weight_heads, fast_weight_sheet
from vision_ttt.explain.inner_loss_figures import (
    inner_loss_comparison,
    inner_loss_course_figure,
    inner_loss_training_figure,
    layer_name,
    running_mean,
)
from vision_ttt.explain.map_figures import (
    PictureMap,
    head_sheet,
    layer_sheet,
    model_sheet,
    plot_gradient_maps,
)
from vision_ttt.explain.norm_figures import norm_map_sheet
from vision_ttt.layers import TTTLinear, ViT3TTT
from vision_ttt.layers.attention_inner import SwiGLUInner, ViT3Inner


class Course(NamedTuple):
    initial: Tensor
    before: Tensor
    updated: Tensor


class Weights(NamedTuple):
    drift: Tensor
    effective_rank: Tensor
    rates: Tensor


def seen(*shape):
    return PictureMap(torch.rand(3, 8, 12), torch.rand(*shape, 2, 3))


def texts(figure):
    return [text.get_text() for text in figure.findobj(lambda each: hasattr(each, "get_text"))]


def test_models_stand_side_by_side():
    before, after = ([seen(), seen()] for _ in range(2))
    figure = model_sheet({"before": before, "after": after}, ["china", "flower"], fraction=0.5)
    rows = [figure.axes[:5], figure.axes[5:10]]
    assert [axis.get_title() for axis in rows[0]] == [
        *("image", "before\n‖G‖", "top 50 %", "after\n‖G‖", "top 50 %")
    ]
    assert [row[0].get_ylabel() for row in rows] == ["china", "flower"]
    for index, row in enumerate(rows):
        assert np.allclose(row[0].images[0].get_array(), before[index].picture.permute(1, 2, 0))
        for maps, over, top in ((before, row[1], row[2]), (after, row[3], row[4])):
            heat = over.images[1].get_array()
            assert torch.equal(torch.from_numpy(heat.data), maps[index].map)
            low, high = over.get_xlabel().split(" – ")
            assert float(low) == pytest.approx(maps[index].map.min().item(), rel=0.05)
            assert float(high) == pytest.approx(maps[index].map.max().item(), rel=0.05)
            bright = (top.images[0].get_array() >= 0.25).all(-1)
            assert bright.mean() == 0.5
    assert any("inner loss per unit" in text for text in texts(figure))


def test_sheets_of_models_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match=r"got 2 titles and \[1\] maps"):
        model_sheet({"a": [seen()]}, ["one", "two"])
    with pytest.raises(ValueError, match=r"at least as large as its map \[h, w\]; got \[3, 1, 9\]"):
        model_sheet({"a": [PictureMap(torch.rand(3, 1, 9), torch.rand(2, 3))]}, ["one"])


def test_tokens_are_drawn_by_the_models_step():
    """The smallest step that covers 36 pixels by three tokens is 12; the model has 16, and pads."""
    picture, maps = torch.ones(3, 36, 8), torch.eye(3, 2)
    padded = PictureMap(picture, maps, (16, 4))
    figure = model_sheet({"a": [padded]}, ["china"], fraction=1 / 6)
    marked = figure.axes[2].images[0].get_array()
    assert marked.shape == (48, 8, 3)
    assert (marked[:16, :4] == 1).all()
    assert (marked[16:32, :4] <= 0.25).all()
    of_layers = layer_sheet({"a": padded._replace(map=maps[None])}, title="china")
    of_heads = head_sheet(picture, maps[None, None], title="", heads=["a"], patch=(16, 4))
    for axis in (of_layers.axes[1], of_heads.axes[0]):
        assert axis.images[1].get_extent() == [0, 8, 48, 0]
    with pytest.raises(ValueError, match=r"leave the last token a pixel, got \(18, 4\)"):
        model_sheet({"a": [padded._replace(patch=(18, 4))]}, ["china"])


def test_a_sheet_of_layers_names_each_and_begins_a_row_for_each_model(monkeypatch):
    monkeypatch.setattr(map_figures, "_MOST_COLUMNS", 2)
    figure = layer_sheet({"deep": seen(3), "flat": seen(2)}, title="china")
    drawn = [axis for axis in figure.axes if axis.images]
    titles = [axis.get_title() for axis in drawn]
    assert titles == [
        *("china", *(f"layer {n}" for n in range(1, 4))),
        *("china", "layer 1", "layer 2"),
    ]
    assert [label for axis in drawn if (label := axis.get_ylabel())] == ["deep", "flat"]


def test_a_sheet_of_heads_has_layers_as_rows():
    magnitude = torch.rand(2, 3, 2, 3)
    names = ["→ head 1", "← head 1", "conv"]
    figure = head_sheet(torch.rand(3, 8, 12), magnitude, title="a model", heads=names)
    grid = np.array(figure.axes[:6]).reshape(2, 3)
    assert [axis.get_title() for axis in grid[0]] == names
    assert [row[0].get_ylabel() for row in grid] == ["layer 1", "layer 2"]
    shown = grid[1, 2].images[1].get_array().data
    assert torch.equal(torch.from_numpy(shown), magnitude[1, 2])


def courses(layers=2):
    return {f"blocks.{n}.mixer.ttt": Course(*torch.rand(3, 20)) for n in range(layers)}


def test_inner_losses_have_a_line_for_each_state_and_a_panel_for_each_layer():
    found = courses(5)
    figure = inner_loss_course_figure(found, window=4, title="Vittt")
    panels = [axis for axis in figure.axes if axis.lines]
    assert [axis.get_title() for axis in panels] == [f"block {n}" for n in range(1, 6)]
    assert len({line.get_color() for line in panels[0].lines}) == 3
    thin, thick = panels[4].lines[:2]
    values = found["blocks.4.mixer.ttt"].initial.numpy()
    assert np.array_equal(thin.get_ydata(), values)
    assert np.array_equal(thick.get_ydata(), running_mean(values, 4))
    assert thin.get_xdata()[0] == 1
    (legend,) = figure.legends
    assert [text.get_text()[:11] for text in legend.get_texts()] == [
        *("ℓ(W₀; xₜ)  ", "ℓ(Wₜ₋₁; xₜ)", "ℓ(Wₜ; xₜ)  ")
    ]
    assert {"Vittt", "inner loss ½‖f(k) − v‖²"} <= set(texts(figure))
    assert panels[4].get_xlabel() == "token, in scan order\n(thick: mean of 4)"
    assert not panels[0].get_xlabel()  # another panel is below


def test_models_are_compared_in_the_panels_of_the_deepest():
    figure = inner_loss_comparison({"epoch 1": courses(1), "epoch 9": courses(2)}, window=1)
    panels = [axis for axis in figure.axes if axis.lines]
    assert [len(axis.lines) for axis in panels] == [2, 1]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["epoch 1", "epoch 9"]


def test_losses_over_the_training_are_means_over_the_scan():
    checkpoints = {9: courses(), 1: courses(), 4: courses()}
    figure = inner_loss_training_figure(checkpoints, unit="update")
    panels = [axis for axis in figure.axes if axis.lines]
    assert [axis.get_title() for axis in panels] == ["block 1", "block 2"]
    assert [len(axis.lines) for axis in panels] == [3, 3]
    updated = panels[1].lines[2]
    assert updated.get_xdata().tolist() == [1, 4, 9]
    wanted = [checkpoints[at]["blocks.1.mixer.ttt"].updated.mean().item() for at in (1, 4, 9)]
    assert updated.get_ydata().tolist() == wanted
    assert panels[0].get_xlabel() == "update"
    assert figure.legends[0].get_texts()[2].get_text().startswith("ℓ(Wₜ; xₜ)")


def test_running_means_shorten_at_the_ends():
    assert running_mean(np.array([1.0, 3.0, 5.0, 7.0]), 3).tolist() == [2.0, 3.0, 5.0, 6.0]
    assert running_mean(np.array([1.0, 3.0]), 1).tolist() == [1.0, 3.0]
    assert running_mean(np.array([1.0, 3.0]), 9).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("blocks.3.mixer.ttt", "block 4"),
        ("backbone.blocks.0.mixer.ttt", "block 1"),
        ("stages.1.blocks.2.mixer", "stage 2, block 3"),
        ("layer", "layer"),
    ],
)
def test_layers_are_named_as_one_counts(name, shown):
    assert layer_name(name) == shown


def weights(layers=2, heads=2):
    return {
        f"blocks.{n}.mixer.ttt": Weights(*torch.rand(2, heads, 5), torch.rand(heads, 64))
        for n in range(layers)
    }


def test_fast_weights_have_a_row_for_each_model_and_a_line_for_each_layer():
    found = {"before": weights(), "after": weights()}
    figure = fast_weight_sheet(found)
    rows = [figure.axes[:3], figure.axes[3:]]
    assert [axis.get_title() for axis in rows[0]] == [
        *("drift of the fast weights", "effective rank of the change", "inner learning rate")
    ]
    assert [row[0].get_ylabel() for row in rows] == [
        *("before\n‖W − W₀‖ / ‖W₀‖", "after\n‖W − W₀‖ / ‖W₀‖")
    ]
    assert [axis.get_xlabel() for axis in rows[1]] == [
        *("mini-batches learnt", "mini-batches learnt", "token, in scan order")
    ]
    own = found["after"]["blocks.1.mixer.ttt"]
    for axis, values, first in zip(rows[1], own, (0, 0, 1), strict=True):
        line = axis.lines[1]
        assert np.allclose(line.get_ydata(), values.mean(0))
        assert line.get_xdata()[0] == first  # states from the initial one, tokens from the first
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["block 1", "block 2"]


def test_fast_weights_by_head():
    found = weights(heads=2)
    figure = fast_weight_heads(found, "rates", heads=["→ head 1", "← head 1"], title="Vittt")
    assert [axis.get_title() for axis in figure.axes] == ["block 1", "block 2"]
    line = figure.axes[1].lines[1]
    assert np.array_equal(line.get_ydata(), found["blocks.1.mixer.ttt"].rates[1])
    assert line.get_label() == "← head 1"
    assert "inner learning rate, η" in texts(figure)


@pytest.mark.parametrize("grid", [(1, 900), (900, 1)])
def test_figures_of_narrow_pictures_are_not_as_long(grid: tuple[int, int]) -> None:
    """A figure of 1 : 900 would take gigabytes when it is saved."""
    picture, own = torch.rand(3, *grid), torch.rand(*grid)
    seen = PictureMap(picture, own)
    for figure in (
        model_sheet({"a": [seen]}, ["x"]),
        layer_sheet({"a": PictureMap(picture, own[None])}, title="x"),
        head_sheet(picture, own[None, None], title="x", heads=["1"]),
        plot_gradient_maps(picture[None], own[None]),
        norm_map_sheet(picture[None], own[None, None] + 1),
    ):
        width, height = figure.get_size_inches()
        assert max(width, height) < 12 * min(width, height)


@pytest.mark.parametrize(
    ("module", "last"),
    [
        (SwiGLUInner(32, 2, 16), "head 3"),
        (ViT3Inner(32, 2, 16), "conv"),
        (ViT3TTT(32, 2), "conv"),
        (TTTLinear(48, 3), "→ head 3"),
    ],
    ids=["SwiGLUInner", "ViT3Inner", "ViT3TTT", "TTTLinear"],
)
def test_the_head_that_is_a_convolution_is_called_so(module, last):
    subject = Subject("a model", SimpleNamespace(model=torch.nn.Sequential(module)))
    assert head_names(subject, 3)[-1] == last
