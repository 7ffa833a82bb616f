"""Colours of classes, and legends."""

import numpy as np
import pytest
from PIL import Image

from vision_ttt.tasks.images.pictures import palette, with_legend
from vision_ttt.tasks.segmentation.pictures import class_colours


def test_colours_differ_and_stay_when_classes_are_added() -> None:
    colours = palette(1203)  # as many as any common dataset has
    assert len(set(colours)) == 1203
    assert palette(20) == colours[:20]
    assert palette(0) == []
    assert all(max(colour) - min(colour) >= 20 for colour in colours)  # none is grey
    first = np.array(colours[:20], dtype=int)
    apart = np.abs(first[:, None] - first[None]).sum(axis=-1) + 999 * np.eye(20, dtype=int)
    assert apart.min() >= 30
    with pytest.raises(ValueError, match="count is -1; it must be at least 0"):
        palette(-1)


def test_a_legend_stands_beside_the_untouched_picture() -> None:
    picture = Image.effect_noise((70, 50), 60).convert("RGB")
    entries = list(
        zip(["sky", "a name that is far too long for a legend"], palette(2), strict=True)
    )
    shown = with_legend(picture, entries)
    assert np.array_equal(np.asarray(shown)[:50, :70], np.asarray(picture))
    beside = np.asarray(shown)[:, 70:].reshape(-1, 3)
    for _, colour in entries:
        assert (beside == colour).all(axis=1).sum() >= 100
    assert shown.width < 70 + 15 * 12 + 12
    assert with_legend(picture, ()).size == picture.size


def test_a_legend_of_many_entries_has_several_columns() -> None:
    names = [f"class {index}" for index in range(30)]
    few = with_legend(Image.new("L", (40, 40)), list(zip(names[:8], palette(8), strict=True)))
    many = with_legend(Image.new("L", (40, 40)), list(zip(names, palette(30), strict=True)))
    assert many.height == few.height  # rows are filled before a column is added
    assert many.width - 40 > 3 * (few.width - 40)


def test_the_background_is_grey_and_the_others_keep_their_colours():
    colours = class_colours(["disc", "background", "ring"])
    assert colours[1] == (128, 128, 128)
    assert [colours[0], colours[2]] == [palette(3)[0], palette(3)[2]]
    assert class_colours([]) == []
