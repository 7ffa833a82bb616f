"""Figures of receptive fields and of token norms."""

import numpy as np
import pytest
import torch
from matplotlib.patches import Circle

from vision_ttt.explain.field_figures import radial_profiles, receptive_field_sheet
from vision_ttt.explain.norm_figures import norm_distributions, norm_map_sheet
from vision_ttt.explain.report import png_bytes

PNG = b"\x89PNG\r\n\x1a\n"


def one_direction():
    field = torch.zeros(8, 8)
    field[:4] = torch.arange(1.0, 33).view(4, 8)
    return field


def test_a_sheet_has_every_field_with_its_numbers():
    fields = {"even": torch.ones(16, 16), "one way": one_direction(), "other": torch.rand(8, 12)}
    figure = receptive_field_sheet(fields)
    even, one_way, other, *_ = axes = [axis for axis in figure.axes if axis.images]
    assert [axis.get_title() for axis in axes] == list(fields)
    assert even.get_xlabel() == "20 % within 4 px\nanisotropy 1.00"
    (circle,) = (patch for patch in even.patches if isinstance(patch, Circle))
    assert (circle.radius, circle.center) == (4, (7.5, 7.5))
    (circle,) = (patch for patch in other.patches if isinstance(patch, Circle))
    assert (circle.radius, circle.center) == (2, (5.5, 3.5))  # of the shorter side
    assert "within 2 px" in other.get_xlabel()
    pictures = [axis.images[0] for axis in axes]
    assert len({(picture.norm.vmin, picture.norm.vmax) for picture in pictures}) == 1
    drawn = one_way.images[0].get_array()
    assert drawn.mask[4:].all()
    assert not drawn.mask[:4].any()
    assert drawn.max() == 1
    (bar,) = (axis for axis in figure.axes if axis.get_label() == "<colorbar>")
    assert bar.get_ylabel() == "response / largest (grey: none)"


def test_the_radius_is_that_of_the_numbers():
    figure = receptive_field_sheet({"even": torch.ones(16, 16)}, radius=12)
    assert png_bytes(figure).startswith(PNG)
    assert figure.axes[0].get_xlabel().startswith("100 % within 12 px")
    (bar,) = (axis for axis in figure.axes if axis.get_label() == "<colorbar>")
    assert bar.get_ylabel() == "response / largest"


def test_profiles_are_over_the_mean_and_the_side():
    figure = radial_profiles({"even": torch.full((8, 12), 3.0), "one way": one_direction()})
    even, other, *_ = figure.axes[0].lines
    assert list(even.get_ydata()) == [1] * 7  # √42.5 to a corner
    assert list(even.get_xdata()[:2]) == [0.125, 0.375]
    assert even.get_color() != other.get_color()


def test_field_figures_refuse():
    with pytest.raises(ValueError, match="there must be fields"):
        receptive_field_sheet({})
    for draw in (receptive_field_sheet, radial_profiles):
        with pytest.raises(ValueError, match="a field must be"):
            draw({"none": torch.zeros(4, 4)})


def norms_with_an_outlier():
    norms = torch.full((2, 9, 4, 4), 2.0)
    norms[1, 8, 2, 3] = 20  # ten times the median
    return norms


def test_norm_maps_frame_outliers_in_one_scale():
    norms = norms_with_an_outlier()
    norms[1, 8, 0, 0] = 20
    figure = norm_map_sheet(torch.rand(2, 3, 16, 16), norms, ["a", "b"])
    pictures = [axis for axis in figure.axes if axis.images]
    names = [axis.get_title() for axis in pictures[:7]]
    assert names == ["image", *(f"layer {layer}" for layer in (1, 3, 4, 6, 7, 9))]
    maps = [axis for index, axis in enumerate(pictures) if index % 7]
    assert len({axis.images[0].norm.vmax for axis in maps}) == 1
    assert [len(axis.lines) for axis in maps] == [0] * 11 + [1]  # of both, however many they are
    assert np.nanmax(maps[-1].lines[0].get_xydata(), axis=0).tolist() == [3.5, 2.5]
    assert maps[-1].images[0].get_array()[2, 3] == 10
    grey = norm_map_sheet(torch.rand(1, 1, 8, 8), norms_with_an_outlier()[1:])
    assert png_bytes(grey).startswith(PNG)


def test_norm_distributions_show_the_outliers():
    even = torch.ones(2, 3, 4, 4)
    figure = norm_distributions({"odd": norms_with_an_outlier(), "even": even})
    above, tails, outliers = figure.axes
    assert above.lines[0].get_xdata()[-1] == 10
    assert above.lines[0].get_ydata()[[0, -1]].tolist() == [100, pytest.approx(100 / 32)]
    assert [line.get_ydata()[-1] for line in tails.lines[:2]] == [1, 10]
    assert outliers.lines[0].get_ydata()[-1] == pytest.approx(100 / 32)
    assert (outliers.lines[1].get_ydata() == 0).all()


def test_norm_figures_refuse():
    images, norms = torch.rand(2, 3, 16, 16), norms_with_an_outlier()
    with pytest.raises(ValueError, match=r"equally many .* got 1, 2 and 1"):
        norm_map_sheet(images[:1], norms)
    with pytest.raises(ValueError, match=r"\[B, 1 or 3, H, W\], got \[2, 2, 16, 16\]"):
        norm_map_sheet(images[:, :2], norms)
    with pytest.raises(ValueError, match="at least one model"):
        norm_distributions({})
    with pytest.raises(ValueError, match=r"norms must be \[B, layers, h, w\], got \[4, 4\]"):
        norm_distributions({"a": norms[0, 0]})
    with pytest.raises(ValueError, match="median above 0"):
        norm_distributions({"a": torch.zeros(1, 1, 2, 2)})
