"""Whole pictures and tiles: what the rows share, what is measured of each way, tables, picture."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from studies.letters.images import LetterSettings, render_letters
from studies.sweeps import SWEEPS, tile_ways
from studies.sweeps.label_pictures import unpacked
from studies.sweeps.one_run import Task, perform
from studies.sweeps.tables import markdown
from studies.sweeps.tile_figure import tile_figure
from studies.sweeps.tile_ways import (
    HALVES,
    OVERLAPPING,
    TILES,
    TIMES,
    WHOLE,
    Tiles,
    _miou,
    labeller,
    letters_right,
    seams,
    tiles_of,
)
from studies.sweeps.tiles import BASE_UPDATES, LABELS_BY, SIDE, TILE, UPDATES
from vision_ttt.bench.memory import Memory
from vision_ttt.dense import build_segmenter
from vision_ttt.errors import UserError
from vision_ttt.tasks.segmentation.evaluation import SegmentationEvaluation, measured

SWEEP = SWEEPS["letters-tiles"]
SMALL = {
    "data.root_options": {"side": 96, "train_images": 8, "test_images": 1, "mark": 8},
    **dict.fromkeys(("data.crop_size", "data.shorter_side", "data.test_shorter_side"), 96),
    "arguments": {"depth": 1, "img_size": 96},
    "updates": 1,
    "warmup": 0,
    "evaluate_every": 1,
    "batch_size": 1,
}


def config(row, overrides=None, folder=Path("runs")):
    return SWEEP.config(SWEEP.by_name[row], 0, folder, overrides)


def model(row="vittt-whole-mark"):
    own = config(row)
    dense = {"maps": own.task.maps, **own.task.parts}
    arguments = {**own.model.arguments, "depth": 1}
    torch.manual_seed(0)
    return build_segmenter(own.model.name, num_classes=11, dense=dense, **arguments).eval()


# Rows


@pytest.mark.parametrize("labels_by", LABELS_BY)
def test_models_see_as_many_pixels_of_the_same_pictures(labels_by):
    whole, tiled, deit = (
        config(f"{name}-{labels_by}") for name in ("vittt-whole", "vittt-tiles", "deit-tiles")
    )
    assert tiled.data == deit.data
    assert whole.data.root_options == tiled.data.root_options
    assert whole.data.root_options.get("by_mark", True) == (labels_by == "mark")
    for own in (whole, tiled):
        assert own.optimisation.batch_size * own.data.crop_size**2 == SIDE**2
    assert tiled.data.window == tiled.data.stride == TILE == whole.data.crop_size // 2


def test_deit_starts_from_its_own_base_and_has_fewer_updates():
    for name in ("vittt", "deit"):
        row = SWEEP.by_name[f"{name}-tiles-mark"]
        assert row.start == f"{name}-128"
        assert config(row.start).optimisation.updates == BASE_UPDATES[name]
        assert config(row.name).optimisation.updates == UPDATES[name]
    assert config("deit-128").data == config("vittt-128").data
    assert UPDATES["vittt"] / UPDATES["deit"] > BASE_UPDATES["vittt"] / BASE_UPDATES["deit"] > 1


def test_edges_of_tiles_cut_letters():
    side = TIMES * SIDE
    cell = side / (side // LetterSettings(side=side).cell)
    for edge in range(TILE, side, TILE):
        assert 0.2 < edge / cell % 1 < 0.8


# Ways


def test_the_ways_are_the_model_on_the_picture_and_on_its_tiles():
    own, image = model(), torch.randn(3, 128, 128)
    labels = {way: labeller(own, tiles_of(way, 128))(image) for way in (WHOLE, TILES, OVERLAPPING)}
    assert all(each.shape == (128, 128) and each.dtype == np.uint8 for each in labels.values())
    with torch.no_grad():
        whole = own(image[None])[0].argmax(0).numpy()
        corner = own(image[None, :, :32, :32])[0].argmax(0).numpy()
    assert (labels[WHOLE] == whole).mean() > 0.999
    assert (labels[TILES][:32, :32] == corner).mean() > 0.999
    for other in (TILES, OVERLAPPING):
        assert (labels[WHOLE] != labels[other]).any()
    assert (labels[TILES] != labels[OVERLAPPING]).any()
    assert tiles_of(HALVES, 128) == Tiles(64, 64)


def test_deit_goes_by_tiles():
    own, image = model("deit-tiles-mark"), torch.randn(3, 64, 64)
    with torch.no_grad():
        tile = own(image[None, :, 32:, 32:])[0].argmax(0).numpy()
    assert (labeller(own, Tiles(32, 32))(image)[32:, 32:] == tile).mean() > 0.999


def test_seams_are_changes_that_are_not_true():
    true = np.zeros((64, 64), np.uint8)
    true[:, 40:] = 3
    assert seams(true, true, 16) == (0, 0)
    rows, columns = np.indices(true.shape) // 16
    assert seams((rows + columns) % 2, np.zeros_like(true), 16) == (1, 0)
    assert seams(np.indices(true.shape).sum(0), np.zeros_like(true), 16) == (1, 1)
    shown = true.copy()
    shown[:, 16:40] = 5  # one false edge of three columns, and of no row
    assert seams(shown, true, 16) == pytest.approx((1 / 6, 0))


def test_letters_are_right_that_are_named_or_hidden():
    settings = LetterSettings(side=256)
    by_mark = render_letters(settings, "test", 0)
    always = render_letters(replace(settings, by_mark=False), "test", 0)
    assert letters_right(by_mark.labels(), by_mark).all()
    assert letters_right(always.labels(), always).all()
    counts = np.array([letter.counts for letter in by_mark.letters])
    assert 0 < counts.sum() < len(counts)
    assert (letters_right(np.zeros((256, 256), np.uint8), by_mark) == ~counts).all()
    assert (letters_right(always.labels(), by_mark) == counts).all()
    assert not letters_right(always.labels() + 1, always).any()


def test_mean_iou_of_labels_is_that_of_logits():
    generator = torch.Generator().manual_seed(0)
    shown, true = torch.randint(4, (2, 3, 20, 20), generator=generator)
    counts = torch.zeros(3, 5, dtype=torch.int64)
    for own, other in zip(shown, true, strict=True):
        logits = torch.nn.functional.one_hot(own, 5).permute(2, 0, 1).float()
        counts += measured(logits, other)[0]
    expected = SegmentationEvaluation(*counts, 0.0, 3).metrics["miou"]
    labels = [each.to(torch.uint8).numpy() for each in shown]
    assert _miou(labels, [each.to(torch.uint8).numpy() for each in true], 5) == expected


# Results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of each row of the mark, as two tiny runs gave them."""
    folder = tmp_path_factory.mktemp("runs")

    def run(row):
        own = config(row, SMALL, folder)
        task = Task(SWEEP.name, row, own, ("studies",), SWEEP.examine, SWEEP.accuracy)
        return perform(task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_ways, "memory_in_processes", _memory_here)  # processes take seconds
        bases = [run("vittt-128"), run("deit-128")]
        whole, deit = run("vittt-whole-mark"), run("deit-tiles-mark")
    return [*bases, whole, replace(whole, row="vittt-tiles-mark"), deit]


def _memory_here(build, device, *, runs):
    assert build()()().shape == (192, 192)  # the call that is measured
    return Memory(2**20), ""


def test_runs_measure_each_way(results):
    base, _, whole, _, deit = results
    assert base.measures == "{}"
    assert list(whole.measured["ways"]) == [WHOLE, HALVES, TILES, OVERLAPPING]
    assert list(deit.measured["ways"]) == [HALVES, TILES, OVERLAPPING]
    own = whole.measured["ways"][WHOLE]
    assert 0 <= own["miou"] <= 1
    assert 0 <= own["right"] <= 1
    assert own["seconds"] > 0
    assert own["memory_bytes"] == 2**20
    assert unpacked(own["labels"]).shape == (48, 48)
    assert unpacked(own["labels"]).max() <= 10


def test_tables_have_a_line_for_each_way(results):
    text = markdown(SWEEP, results)
    assert "| labels by the distant mark | seen as |" in text
    assert "labels by the letter alone" not in text  # of which there are no results
    lines = [line for line in text.split("\n") if "trained on whole pictures | " in line]
    assert [line.split(" | ")[1] for line in lines] == [
        *("whole", "tiles of 528²", "tiles of 264²", "tiles of 264², half overlapping"),
        "vittt-whole-mark",  # in the table of its training
    ]
    assert text.count("| DeiT with Conv2d, trained on tiles | tiles") == 3
    two = markdown(SWEEP, [*results, replace(results[2], seed=1)])
    assert f"| {100 * results[2].measured['ways'][WHOLE]['miou']:.1f} |" in two
    assert "| 0, 1 |" in two


def test_the_picture_has_what_each_way_made_of_it(results):
    axes = tile_figure(SWEEP, results).axes
    assert [len(axis.images) for axis in axes] == [1] * 6
    assert [len(axis.lines) for axis in axes] == [0, 0, 0, 6, 6, 6]
    assert axes[2].get_title().startswith("Vittt, whole: ")
    with pytest.raises(UserError, match="needs results of deit-tiles-mark"):
        tile_figure(SWEEP, results[:4])
