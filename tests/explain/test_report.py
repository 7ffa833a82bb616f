"""Figures and the report page."""

import base64
import io
import re
from types import SimpleNamespace

import pytest
import timm
import torch
from matplotlib.text import Text
from PIL import Image

from vision_ttt.explain.figures import confusion_matrix, inner_loss_curves
from vision_ttt.explain.map_figures import gradient_map_sheet, plot_gradient_maps
from vision_ttt.explain.report import Section, png_bytes, render_report
from vision_ttt.tasks.classification.report import _gradient_maps, _reading, panels_of
from vision_ttt.tasks.figures import learning_curves

HISTORY = [
    {
        "epoch": epoch,
        "train_loss": 2.0 / epoch,
        "test_loss": 2.1 / epoch,
        "test_accuracy": 1 - 0.5 / epoch,
        "inner_loss": 10.0 + epoch,
        "inner_losses": {f"blocks.{i}.mixer.ttt": [5.0, 3.0 - i] for i in range(5)},
    }
    for epoch in (1, 2, 3)
]
PANELS = panels_of(HISTORY)
PNG = b"\x89PNG\r\n\x1a\n"


def test_curves_show_the_history():
    figure = learning_curves(HISTORY, PANELS)
    assert png_bytes(figure).startswith(PNG)
    train, test = figure.axes[0].lines
    assert list(train.get_ydata()) == [row["train_loss"] for row in HISTORY]
    assert list(test.get_ydata()) == [row["test_loss"] for row in HISTORY]
    assert list(figure.axes[1].lines[0].get_ydata()) == [50, 75, pytest.approx(250 / 3)]
    assert len(figure.axes) == 3


def test_curves_of_a_model_without_inner_loops():
    history = [{**row, "inner_loss": None, "inner_losses": {}} for row in HISTORY]
    assert len(panels_of(history)) == 2


def test_inner_loss_curves_show_first_middle_and_last_epoch():
    figure = inner_loss_curves(HISTORY)
    lines = figure.axes[3].lines
    assert [line.get_label() for line in lines] == ["epoch 1", "epoch 2", "epoch 3"]
    assert list(lines[0].get_ydata()) == [5.0, 0.0]
    assert png_bytes(figure).startswith(PNG)


@pytest.mark.parametrize("classes", [3, 100])
def test_confusion_matrix_labels_what_is_readable(classes):
    confusion = torch.eye(classes, dtype=torch.int64) * 7
    confusion[0, 2] = 3  # of true class 0, taken for class 2
    figure = confusion_matrix(confusion, [f"class {i}" for i in range(classes)])
    shown = figure.axes[0].images[0].get_array()
    assert shown[0, 2] == pytest.approx(0.3)
    assert shown[2, 0] == 0
    numbers = [text.get_text() for text in figure.axes[0].texts]
    assert numbers == (["7", "3", "7", "7"] if classes == 3 else [])
    assert png_bytes(figure).startswith(PNG)


def test_gradient_map_sheet_has_three_pictures_per_image():
    images, maps = torch.rand(5, 3, 32, 32), torch.rand(5, 8, 8)
    figure = gradient_map_sheet(images, maps, list("abcde"), per_row=3)
    pictures = [axis for axis in figure.axes if axis.images]
    assert len(pictures) == 15
    shown = [torch.from_numpy(axis.images[0].get_array().data) for axis in pictures]
    for index, (picture, own) in enumerate([(0, 3), (1, 4), (2, 5), (9, 11), (10, 12)]):
        assert torch.equal(shown[picture], images[index].permute(1, 2, 0))
        assert torch.equal(shown[own], maps[index])
    assert sorted(t for a in figure.axes if (t := a.get_title())) == list("abcde")
    assert png_bytes(figure).startswith(PNG)
    with pytest.raises(ValueError, match="at least as large as its map"):
        gradient_map_sheet(torch.rand(5, 3, 32, 32), torch.rand(5, 40, 8), list("abcde"))
    with pytest.raises(ValueError, match="at least one, got 0, 0, 0"):
        gradient_map_sheet(torch.rand(0, 3, 32, 32), torch.rand(0, 8, 8), [])
    with pytest.raises(ValueError, match="equally many and at least one, got 5, 4, 5"):
        gradient_map_sheet(torch.rand(5, 3, 32, 32), torch.rand(4, 8, 8), list("abcde"))


def test_gradient_map_sheet_marks_the_tokens_of_largest_gradient_on_padded_images():
    maps = torch.zeros(1, 2, 2)
    maps[0, 1, 0] = 1.0
    figure = gradient_map_sheet(torch.ones(1, 3, 7, 5), maps, ["a"])  # patches of 4 × 3
    image, _, marked = (axis.images[0].get_array() for axis in figure.axes if axis.images)
    assert image.shape == marked.shape == (8, 6, 3)
    assert (image[7] == 0).all()
    assert (marked[4:7, :3] == 1).all()
    assert (marked[:4] <= 0.25).all()


def test_tokens_are_drawn_by_the_models_step():
    """The smallest step that covers 36 pixels by three tokens is 12; the model has 16, and pads."""
    images, maps = torch.ones(1, 3, 36, 8), torch.tensor([[[1.0, 0], [0, 0], [0, 0]]])
    for figure in (
        gradient_map_sheet(images, maps, ["a"], patch=(16, 4)),
        plot_gradient_maps(images, maps, patch=(16, 4)),
    ):
        marked = [axis for axis in figure.axes if axis.images][-1].images[0].get_array()
        assert marked.shape == (48, 8, 3)
        bright = (marked >= 0.5).all(-1)
        assert bright[:16, :4].all()
        assert not bright[16:32, :4].all()
    # Patches of 4 pixels overlap at steps of 2: the image is not cut to 15 × 2 pixels.
    images, maps = torch.ones(1, 3, 32, 32), torch.ones(1, 15, 15)
    figure = plot_gradient_maps(images, maps, fraction=1, patch=(2, 2))
    marked = figure.axes[2].images[0].get_array()
    assert marked.shape == (32, 32, 3)
    assert (marked == 1).all()


PHONE = 390 - 2 * 16  # CSS pixels of a phone's width that the page leaves to a figure


def smallest_text(figure, width):
    """In CSS pixels, where the figure is shown ``width`` pixels wide at most."""
    figure.canvas.draw()
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert texts
    inches, dots = figure.get_size_inches()[0], 130
    shown = min(width, inches * dots)
    return min(text.get_fontsize() for text in texts) / 72 * shown / inches


def narrow_figures():
    twelve = [
        {**row, "inner_losses": {f"blocks.{i}.mixer.ttt": [5.0, 3.0] for i in range(12)}}
        for row in HISTORY
    ]
    names = [f"class {i}" for i in range(10)]
    sheet = torch.rand(20, 3, 32, 32), torch.rand(20, 8, 8), ["0 → 0"] * 20
    return {
        "curves": lambda: learning_curves(HISTORY, PANELS, narrow=True),
        "inner loss": lambda: inner_loss_curves(HISTORY, narrow=True),
        "inner loss of twelve": lambda: inner_loss_curves(twelve, narrow=True),
        "confusion": lambda: confusion_matrix(torch.eye(10), names, narrow=True),
        "confusion of many": lambda: confusion_matrix(torch.eye(100), ["a"] * 100, narrow=True),
        "maps": lambda: gradient_map_sheet(*sheet, per_row=4),
    }


@pytest.mark.parametrize("name", narrow_figures())
def test_figures_can_be_read_on_a_phone(name):
    assert smallest_text(narrow_figures()[name](), PHONE) >= 7.5


def test_wide_figures_would_not_do_on_a_phone():
    assert smallest_text(learning_curves(HISTORY, PANELS), PHONE) < 5


def page_of(**options):
    figure = learning_curves(HISTORY, PANELS)
    section = Section("Curves", "Read me", figure, **options)
    return render_report("Run <1>", {"accuracy": "99 %"}, [section], "seed: 0\na: <b>")


def test_each_figure_is_linked_to_its_full_size():
    page = page_of(narrow=learning_curves(HISTORY, PANELS, narrow=True))
    wide, narrow = (
        base64.b64decode(picture)
        for kind in ("wide", "narrow")
        for picture in re.findall(f'<img class="{kind}"[^>]*base64,([^"]+)"', page)
    )
    widths = [Image.open(io.BytesIO(picture)).width for picture in (wide, narrow)]
    assert widths[0] == pytest.approx(12.6 * 130, abs=1)
    assert widths[1] == pytest.approx(4.2 * 130, abs=1)
    places = set(re.findall(r'id="([^"]+)"', page))
    links = re.findall(r'href="#([^"]+)"', page)
    assert links == ["full-1", "full-1", "fit-1"]
    assert set(links) == places
    assert '<a href="#full-1"><img' in page.replace("\n", "")


def test_report_is_self_contained_and_escapes():
    page = page_of()
    assert "Run &lt;1&gt;" in page
    assert "a: &lt;b&gt;" in page
    (picture,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert base64.b64decode(picture).startswith(PNG)
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "<script" not in page


def test_plotted_maps_have_a_row_of_three_pictures_per_image():
    images, maps = torch.rand(2, 3, 30, 32), torch.rand(2, 8, 8)
    figure = plot_gradient_maps(images, maps, ["first", "second"], fraction=0.25)
    assert png_bytes(figure).startswith(PNG)
    rows = [figure.axes[:3], figure.axes[3:6]]
    assert [axis.get_title() for axis in rows[0]] == ["image", "‖G‖", "top 25 %"]
    assert [row[0].get_ylabel() for row in rows] == ["first", "second"]
    for (plain, over, top), own in zip(rows, maps, strict=True):
        (picture,) = plain.images
        under, heat = over.images
        (marked,) = top.images
        assert torch.equal(torch.from_numpy(heat.get_array().data), own)
        assert heat.get_alpha() < 1
        assert under.get_extent() == heat.get_extent() == [0, 32, 32, 0]
        bright = (marked.get_array() >= 0.25).all(-1)
        assert bright[:28].mean() == pytest.approx(0.25, abs=0.05)  # the rest is rim
        assert picture.get_array().shape == (32, 32, 3)


def test_plotting_leaves_pyplot_alone():
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    plot_gradient_maps(torch.rand(1, 1, 8, 8), torch.rand(1, 2, 2))
    assert pyplot.get_fignums() == before


@pytest.mark.parametrize(
    ("images", "maps", "options", "message"),
    [
        ((2, 3, 8, 8), (1, 2, 2), {}, "at least one, got 2, 1, 2"),
        ((1, 3, 8, 8), (1, 9, 2), {}, r"as large as its map \[h, w\]; got \[3, 8, 8\]"),
        ((1, 4, 8, 8), (1, 2, 2), {}, r"\[1 or 3, H, W\] .* got \[4, 8, 8\]"),
        ((1, 3, 8, 8), (1, 2, 2), {"patch": (8, 4)}, r"leave the last token a pixel, got \(8, 4\)"),
        ((1, 3, 9, 8), (1, 8, 2), {}, r"leave the last token a pixel, got \(2, 4\)"),
        ((1, 3, 8, 8), (1, 2, 2), {"fraction": 0}, r"fraction must be in \(0, 1\], got 0"),
    ],
)
def test_plotting_refuses(images, maps, options, message):
    with pytest.raises(ValueError, match=message):
        plot_gradient_maps(torch.rand(images), torch.rand(maps), **options)


def test_the_reports_maps_are_drawn_by_the_models_step():
    options = {"patch_size": 16, "dynamic_img_size": True, "dynamic_img_pad": True}
    model = timm.create_model("vittt_nano_patch4_32", depth=1, **options)
    chosen = torch.tensor([0, 1])
    task = SimpleNamespace(
        test_set=[(torch.zeros(3, 36, 36), label) for label in (0, 1)],
        input={"mean": (0.5,) * 3, "std": (0.5,) * 3},
        classes=["a", "b"],
    )
    evaluation = SimpleNamespace(targets=chosen, predictions=chosen)
    result = SimpleNamespace(model=model, evaluation=evaluation)
    _, maps, titles, patch = _gradient_maps(task, result)
    assert titles == ["a → a", "b → b"]
    assert (maps.shape, patch) == ((2, 3, 3), (16, 16))


def test_a_rising_inner_loss_is_explained():
    falls = [{**row, "inner_loss_reduction": 0.2 * row["epoch"]} for row in HISTORY]
    text = _reading(falls)
    assert "Training does not minimise the inner loss" in text
    assert "by 20% at the first evaluation, by 60% at the last." in text
    unknown = [{**row, "inner_loss_reduction": None} for row in HISTORY]
    assert _reading(unknown).endswith("to the last.")
    without = [{**row, "inner_loss": None} for row in unknown]
    assert _reading(without) == "Loss and accuracy at each evaluation."
