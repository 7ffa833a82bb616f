"""Curves of several maps of one model, their figure, their CSV file and their tables."""

import dataclasses
from importlib.util import find_spec
from pathlib import Path

import pytest
import timm
import torch

from studies.deletion.curves import area_under, deletion_curve, mean_colour
from studies.deletion.figures import deletion_figure
from studies.deletion.results import (
    DeletionResult,
    read_deletion_results,
    write_deletion_results,
)
from studies.deletion.study import METHODS, MapCurves, measure_maps, methods_for
from studies.deletion.tables import (
    by_model,
    deletion_markdown,
    panels,
    tabulate_deletion,
)
from tolerances import assert_close
from vision_ttt.bench.rows import Run
from vision_ttt.errors import UserError
from vision_ttt.explain.gradient_maps import DEFAULT_STATE, STATES

MEASURED = Path(__file__).parents[3] / "studies/results/deletion-insertion.csv"
RUN = Run(
    *("2026-01-02T03:04:05+00:00", "python -m studies deletion a b", "c0ffee", "a processor"),
    *(2, "avx2", 1, "a processor", "3.11.7", "2.15.0", "1.0.31", "0.1.0"),
)


def tiny(name, **options):
    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return timm.create_model(name, num_classes=3, **size, **options)


@pytest.fixture(scope="module")
def images():
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


LABELS = torch.tensor([0, 2, 1])


def test_of_the_states_free_of_the_scan_the_default_is_nowhere_behind_random():
    """One half of the rule by which it was chosen; the photographs of the gradient maps' tests are
    the other."""
    titled = by_model(read_deletion_results(MEASURED))
    smallest = {state: [] for state in STATES}
    for results in titled.values():
        _, lines = tabulate_deletion(results)
        for _, method, _, deletion, _, insertion, _ in lines:
            _, _, state = method.partition("gradient magnitude, ")
            if state:
                smallest[state] += [float(gain.split(" ")[0]) for gain in (deletion, insertion)]
    # Deletion and insertion, with three fills on two data sets, and two on the solar cells.
    assert len(smallest[DEFAULT_STATE]) == 16
    assert min(smallest[DEFAULT_STATE]) > -0.01
    assert min(smallest["final"]) < -0.15


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("vittt_nano_patch4_32", {"attention rollout"}),
        (
            "deit_tiny_patch16_224",
            {f"gradient magnitude, {s}" for s in ("final", "initial", "current")},
        ),
        (
            "vit3_tiny_patch16_224",
            {"attention rollout", "gradient magnitude, final", "gradient magnitude, current"},
        ),
    ],
)
def test_every_method_that_fits_a_model_has_maps_of_it(images, name, missing):
    model = tiny(name)
    assert set(METHODS) - set(methods_for(model)) == missing
    for method in methods_for(model):
        if method == "Grad-CAM" and find_spec("pytorch_grad_cam") is None:
            continue  # of the extra [explain]
        maps = METHODS[method].maps(model, images, LABELS)
        assert (maps.shape, maps.dtype) == ((3, 4, 4), torch.float32), method
        assert maps.isfinite().all(), method


def test_curves_are_means_over_images_and_draws(images):
    model = tiny("vittt_nano_patch4_32").train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    fills = {"mean": mean_colour(images), "other": torch.ones(())}
    methods = ["random", "gradient magnitude, final"]
    seen = []
    curves = measure_maps(
        *(model, images, LABELS),
        fills=fills,
        methods=methods,
        points=5,
        draws=2,
        batch_size=2,
        on_curve=lambda: seen.append(1),
    )
    told = [(each.method, each.fill, each.draws) for each in curves]
    assert told == [(m, f, 2 if m == "random" else 1) for m in methods for f in fills]
    assert len(seen) == 4
    shares = (0, 0.25, 0.5, 0.75, 1)
    assert {each.shares for each in curves} == {shares}
    maps = METHODS[methods[1]].maps(model, images, LABELS)
    heights = deletion_curve(model, images, LABELS, maps, shares, fill=fills["other"]).mean(0)
    assert_close(torch.tensor(curves[3].deletion), heights, 1e-5)
    assert curves[3].deletion_area == pytest.approx(area_under(heights, shares).item())
    drawn = [
        deletion_curve(
            *(model, images, LABELS, torch.zeros(3, 4, 4), shares), fill=fills["mean"], seed=seed
        )
        for seed in range(2)
    ]
    assert_close(torch.tensor(curves[0].deletion), torch.cat(drawn).mean(0), 1e-5)
    for each in curves:  # all tokens removed is none revealed
        assert each.deletion[0] == pytest.approx(each.insertion[-1], abs=1e-6)
        assert each.deletion[-1] == pytest.approx(each.insertion[0], abs=1e-6)
    assert model.training
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert all(x.grad is None for x in model.parameters())


@pytest.mark.parametrize(
    ("name", "options", "side", "grid"),
    [
        (
            "vittt_nano_patch4_32",
            {"dynamic_img_size": True, "dynamic_img_pad": True, "num_heads": 2},
            *(9, 3),
        ),
        ("vim_nano_patch4_32", {"stride": 2}, 16, 7),
        ("resnet10t", None, 65, 3),
    ],
)
def test_models_whose_tokens_do_not_divide_the_image_have_curves(name, options, side, grid):
    torch.manual_seed(0)
    if options is not None:
        options = {"img_size": 16, "embed_dim": 32, "depth": 1, **options}
    model = timm.create_model(name, num_classes=3, **(options or {}))
    images = torch.randn(2, 3, side, side)
    methods = ["random", "contrast", "gradient × input"]
    for method in methods:
        assert METHODS[method].maps(model, images, LABELS[:2]).shape == (2, grid, grid)
    curves = measure_maps(
        *(model, images, LABELS[:2]), fills={"mean": mean_colour(images)}, methods=methods, points=3
    )
    assert [each.method for each in curves] == methods


def test_the_centre_is_the_images_and_not_that_of_its_padding():
    """Of 9 rows the tokens have 4, 4 and 1."""
    model = tiny("vittt_nano_patch4_32", dynamic_img_size=True, dynamic_img_pad=True)
    maps = METHODS["centre"].maps(model, torch.zeros(1, 3, 9, 4), LABELS[:1])
    assert_close(maps[0, :, 0], -torch.tensor([2.5, 1.5, 4.0]) / 9, 1e-6)


def test_the_curves_of_padded_images_remove_the_models_tokens(images):
    """Of 9 rows and patches of 4, tokens have 4, 4 and 1: 3 each would be other pixels."""
    model = tiny("vittt_nano_patch4_32", dynamic_img_size=True, dynamic_img_pad=True)
    images = images[..., :9, :9]
    fills = {"mean": mean_colour(images)}
    (curves,) = measure_maps(model, images, LABELS, fills=fills, methods=["centre"], points=4)
    maps = METHODS["centre"].maps(model, images, LABELS)
    arguments = (model, images, LABELS, maps, curves.shares)
    heights = deletion_curve(*arguments, fill=fills["mean"], patch=(4, 4)).mean(0)
    others = deletion_curve(*arguments, fill=fills["mean"]).mean(0)
    assert_close(torch.tensor(curves.deletion), heights, 1e-6)
    assert not torch.allclose(heights, others)


def test_the_fast_model_makes_the_curves_alone(images):
    model, other = tiny("vittt_nano_patch4_32"), tiny("deit_tiny_patch16_224")
    arguments = {"fills": {"mean": mean_colour(images)}, "methods": ["random"], "points": 2}
    (curves,) = measure_maps(model, images, LABELS, fast=other, **arguments)
    (of_other,) = measure_maps(other, images, LABELS, **arguments)
    assert curves == of_other


def test_what_does_not_fit_is_refused(images):
    fills = {"mean": mean_colour(images)}
    with pytest.raises(ValueError, match="Vittt has no map by attention rollout, saliency; it has"):
        measure_maps(
            *(tiny("vittt_nano_patch4_32"), images, LABELS),
            fills=fills,
            methods=["random", "attention rollout", "saliency"],
        )
    with pytest.raises(ValueError, match="draws and batch_size must be at least 1, got 0 and 64"):
        measure_maps(tiny("vittt_nano_patch4_32"), images, LABELS, fills=fills, draws=0)
    with pytest.raises(TypeError, match="got Flatten"):
        measure_maps(torch.nn.Flatten(), images, LABELS, fills=fills)


def result(method, seed, deletion, insertion, *, fill="mean", model="vittt"):
    """Straight lines from 1 to `deletion` and from 0 to `insertion`."""
    draws = 3 if method == "random" else 1
    curves = MapCurves(method, fill, draws, (0.0, 1.0), (1.0, deletion), (0.0, insertion))
    return DeletionResult("runs/pictures", model, f"seed-{seed}", seed, 500, 64, curves, RUN)


@pytest.fixture
def results():
    """Random areas of 0.75 and 0.25; the centre's gains are 0.1, 0.2 and -0.05, -0.15."""
    return [
        *(result("random", seed, 0.5, 0.5) for seed in (0, 1)),
        result("centre", 0, 0.3, 0.4),
        result("centre", 1, 0.1, 0.2),
        result("random", 0, 0.5, 0.5, fill="blur"),
        result("centre", 0, 0.5, 0.5, fill="blur"),
    ]


def test_tables_have_gains_against_the_same_models_random_order(results):
    headings, lines = tabulate_deletion(results)
    assert len(headings) == 7
    assert lines == [
        ["mean", "random", "0.750", "", "0.250", "", "2"],
        [
            "mean",
            "centre",
            "0.600 ± 0.071",
            "+0.150 ± 0.071",
            "0.150 ± 0.071",
            "-0.100 ± 0.071",
            "2",
        ],
        ["blur", "random", "0.750", "", "0.250", "", "1"],
        ["blur", "centre", "0.750", "+0.000", "0.250", "+0.000", "1"],
    ]
    with pytest.raises(UserError, match="seed-0 has no result of a random order with fill 'mean'"):
        tabulate_deletion(results[2:])


def test_markdown_tells_where_the_numbers_come_from(results):
    text = deletion_markdown([*results, result("random", 5, 0.5, 0.5, model="deit")])
    assert text.startswith("`deletion`, mean ± sample standard deviation")
    assert "on 500 test images, curves of 2 points" in text
    assert "c0ffee" not in text  # commits and commands are in the results' rows
    assert "**vittt on pictures**, 64 tokens\n\n| pixels become | order by |" in text
    assert "**deit on pictures**" in text
    assert "| mean | centre | 0.600 ± 0.071 |" in text
    with pytest.raises(UserError, match="there are no results"):
        deletion_markdown([])


def test_csv_gives_back_what_was_written(results, tmp_path):
    path = tmp_path / "new" / "results.csv"
    results[0] = dataclasses.replace(results[0], seed=None)
    write_deletion_results(path, results)
    assert read_deletion_results(path) == results
    text = path.read_text()
    assert text.count("\n") == 7
    assert "c0ffee" in text
    path.write_text(text.replace("deletion_area,", "area,"))
    with pytest.raises(UserError, match="its columns are"):
        read_deletion_results(path)
    for spoilt in (text.replace(",500,", ",many,"), text.replace('"[0.0, 1.0]"', "1")):
        path.write_text(spoilt)
        with pytest.raises(UserError, match=r"results\.csv, line 2: "):
            read_deletion_results(path)


def test_the_figure_has_a_line_for_each_method_and_a_band_over_its_seeds(results):
    shown = panels(results)
    assert list(shown) == ["vittt on pictures"]
    figure = deletion_figure(shown | {"again": shown["vittt on pictures"]})
    axes = figure.axes
    assert [axis.get_title() for axis in axes[:2]] == [
        "vittt on pictures: deletion",
        "vittt on pictures: insertion",
    ]
    assert len(axes) == 4
    for axis in axes:
        assert len(axis.lines) == len(axis.collections) == 2
    centre = axes[0].lines[1]
    assert centre.get_ydata().tolist() == pytest.approx([1, 0.2])
    band = axes[0].collections[1].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((0.1, 1))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["random", "centre"]
    colours = [line.get_color() for line in axes[0].lines]
    assert len(set(colours)) == 2


def test_the_figure_refuses(results):
    with pytest.raises(ValueError, match="at least one panel, got none"):
        deletion_figure({})
    with pytest.raises(ValueError, match="panel 'a' must be some"):
        deletion_figure({"a": []})
    with pytest.raises(ValueError, match="of one fill and the same shares"):
        deletion_figure({"a": [each.curves for each in results]})
    with pytest.raises(UserError, match="no results with fill 'black'"):
        panels(results, "black")
