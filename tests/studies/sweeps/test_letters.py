"""The sweep of letters: models of equal size, lengths by pace, and what is measured of the mark."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from studies.letters import RECIPE
from studies.letters.dataset import LetterImages, open_letters
from studies.sweeps import SWEEPS, lengths, linearize, linearize_letters, paces
from studies.sweeps.definition import GivenSeconds
from studies.sweeps.extrapolation import LARGEST, balanced, measure_larger
from studies.sweeps.lengths import LENGTHS_FILE, lengths_by_pace, of_updates
from studies.sweeps.letter_figure import letter_figure
from studies.sweeps.letters import CHOSEN, COMPARED, EVALUATIONS, LABELS, SIDES, TOKENS
from studies.sweeps.letters import RATES as TRIED
from studies.sweeps.mark import BAND, measure_mark
from studies.sweeps.one_run import Task, perform
from studies.sweeps.paces import measure_paces
from studies.sweeps.results import read_results
from studies.sweeps.tables import markdown
from vision_ttt.dense import build_segmenter
from vision_ttt.recipes import change, load

SWEEP, RATES = SWEEPS["resolution-letters"], SWEEPS["letters-rates"]
COMMITTED = Path(__file__).parents[3] / "studies/results/resolution-letters.csv"


def config(row, sweep=SWEEP):
    return sweep.config(sweep.by_name[row], 0, Path("runs"))


def model(row):
    own = config(row)
    dense = {"maps": own.task.maps, **own.task.parts}
    return build_segmenter(own.model.name, num_classes=11, dense=dense, **own.model.arguments)


def test_models_have_as_many_parameters_without_positions():
    def count(name):
        weights = model(f"{name}-128").named_parameters()
        return sum(x.numel() for key, x in weights if "pos_embed" not in key)

    own = count("vittt")
    for name in COMPARED:
        assert abs(count(name) / own - 1) < 0.025, name


@pytest.mark.parametrize("row", [row.name for row in SWEEP.rows if row.name.endswith("-128")])
def test_every_model_makes_a_finite_step(row):
    own = model(row)
    loss = own(torch.randn(1, 3, 128, 128)).square().mean()
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in own.parameters() if p.grad is not None)


def test_an_update_has_as_many_tokens_at_every_size():
    for side in SIDES[:3]:
        own = config(f"vittt-{side}")
        assert (
            own.data.root_options["side"]
            == own.data.crop_size
            == own.data.test_shorter_side
            == side
        )
        patch = own.model.arguments["patch_size"]
        assert own.optimisation.batch_size * (side // patch) ** 2 == TOKENS


def test_rows_of_twice_the_time_differ_by_it_alone():
    for name in LABELS:
        once, twice = (SWEEP.by_name[f"{name}-{SIDES[0]}{end}"] for end in ("", "-twice"))
        assert twice.changes == once.changes
        assert twice.length.seconds == 2 * once.length.seconds


def test_rows_of_a_side_differ_by_the_model_and_its_rate_alone():
    def rest(row):
        own = config(row)
        optimisation = replace(own.optimisation, learning_rate=1.0)
        machine = replace(own.machine, composite_ops=True)  # which changes no result
        return own.task, own.data, optimisation, machine, replace(own.run, output="any")

    for panel in SWEEP.panels:
        first, *others = panel.rows.values()
        assert all(rest(first) == rest(other) for other in others)


def test_rates_are_chosen_on_the_validation_split():
    for row in RATES.rows:
        assert config(row.name, RATES).data.root_options["test_split"] == "validation"
    assert "test_split" not in config("vittt-512").data.root_options
    assert not set(RATES.seeds) & set(SWEEP.seeds)


def test_the_chosen_rates_are_those_of_least_loss():
    committed = Path(__file__).parents[3] / "studies/results/letters-rates.csv"
    losses: dict[str, dict[float, float]] = {}
    for result in read_results(committed):
        model, _, rate = result.row.rpartition("-")
        losses.setdefault(model, {})[float(rate)] = result.test_loss
    assert {model: min(own, key=own.get) for model, own in losses.items()} == CHOSEN
    assert all(set(own) == set(TRIED) for own in losses.values())
    assert "test mean IoU, %" in markdown(RATES, read_results(committed))
    assert len(letter_figure(RATES, read_results(committed)).axes) == 2 * len(COMPARED)


# Lengths


def test_lengths_by_pace_are_measured_once(tmp_path, monkeypatch):
    paces = {"a": 0.25, "b": 30.0}
    asked = []

    def measured(configs):
        asked.append(set(configs))
        return {name: paces[name] for name in configs}

    monkeypatch.setattr(lengths, "measure_paces", measured)
    folder = tmp_path / "runs"
    seconds = {"a": 10.0, "b": 20.0}
    assert lengths_by_pace({"a": None}, seconds, folder)["a"]["updates"] == 40
    found = lengths_by_pace({"a": None, "b": None}, seconds, folder)
    assert {name: own["updates"] for name, own in found.items()} == {"a": 40, "b": 1}
    assert asked == [{"a"}, {"b"}]
    assert json.loads((folder / LENGTHS_FILE).read_text()) == found


def test_lengths_of_rows_with_results_are_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths, "measure_paces", lambda configs: dict.fromkeys(configs, 2.0))
    results = [each for each in read_results(COMMITTED) if each.row != "deit-1024"]
    rows = dict.fromkeys(("vittt-512", "deit-1024"))
    found = lengths_by_pace(rows, dict.fromkeys(rows, 180.0), tmp_path / "runs", results)
    assert {name: own["updates"] for name, own in found.items()} == {
        "vittt-512": 1010,
        "deit-1024": 90,
    }
    assert found["vittt-512"]["seconds_per_update"] == pytest.approx(180 / 1010)
    file = tmp_path / "runs" / LENGTHS_FILE
    assert json.loads(file.read_text()) == found
    file.write_text(json.dumps({"vittt-512": {**found["vittt-512"], "updates": 500}}))
    again = lengths_by_pace(rows, dict.fromkeys(rows, 180.0), tmp_path / "runs", results)
    assert again == found  # other seeds are as long as those that were trained


def test_evaluations_stay_as_many():
    own = config("vittt-512")
    changed = change(own, of_updates(300, own))
    assert changed.optimisation.updates == 300
    assert changed.optimisation.warmup == pytest.approx(300 / 25)
    assert -(-300 // changed.run.evaluate_every) == EVALUATIONS


def test_paces_are_those_of_updates(tmp_path, monkeypatch):
    small = {"side": 64, "train_images": 8, "test_images": 1, "glyph": 16}
    sizes = dict.fromkeys(("data.crop_size", "data.shorter_side", "data.test_shorter_side"), 64)
    common = {
        "data.root_options": small,
        **sizes,
        "num_workers": 0,
        "output": str(tmp_path / "run"),
    }
    runs = {
        f"{depth} blocks": load(str(RECIPE), {**common, "arguments": {"depth": depth}})
        for depth in (1, 8)
    }
    threads = torch.get_num_threads()
    kept = []
    monkeypatch.setattr(paces, "keep_freed_memory", lambda: kept.append(True))
    seconds = measure_paces(runs, repeats=1)
    assert bool(kept) is not torch.accelerator.is_available()  # as training does
    assert 0 < 2 * seconds["1 blocks"] < seconds["8 blocks"]
    assert torch.get_num_threads() == threads
    assert not (tmp_path / "run").exists()


def test_a_run_keeps_what_tables_and_pictures_need(tmp_path):
    small = {"side": 64, "train_images": 8, "test_images": 2, "glyph": 16}
    sizes = dict.fromkeys(("data.crop_size", "data.shorter_side", "data.test_shorter_side"), 64)
    own = load(
        str(RECIPE),
        {
            "data.root_options": small,
            **sizes,
            "arguments": {"depth": 1},
            "updates": 2,
            "batch_size": 1,
            "evaluate_every": 1,
            "num_workers": 0,
            "output": str(tmp_path / "run"),
        },
    )
    task = Task(SWEEP.name, "vittt-512", own, ("vision-ttt",), SWEEP.examine, SWEEP.accuracy)
    result = perform(task)
    saved = json.loads((tmp_path / "run" / "metrics.json").read_text())["history"]
    assert result.curve["test_accuracy"] == pytest.approx(
        [row["test_miou"] for row in saved], rel=1e-4
    )
    assert result.measured["images"] == [1, 2]
    assert result.measured["memory_bytes"] > 2**20
    assert set(result.measured["on_larger"]) == {"2", "4", "8"}
    assert sum(band["count"] for band in result.measured["bands"]) > 0
    assert letter_figure(SWEEP, [result]).axes
    table = markdown(SWEEP, [result, replace(result, seed=1)])
    assert "test mean IoU, %" in table
    for sides in (2, 4, 8):
        assert f"at {sides} × the side, %" in table
    assert "on 2 test images" in table
    kept = {key: value for key, value in result.measured["on_larger"].items() if key != "8"}
    fewer = json.dumps({**result.measured, "on_larger": kept})
    # What no row of a panel has measured has no column there; what one has not is empty.
    without = [replace(result, seed=seed, measures=fewer) for seed in (0, 1)]
    assert "at 8 × the side" not in markdown(SWEEP, without)
    beside = replace(without[0], row="vit3-512", test_images=7)
    table = markdown(SWEEP, [result, beside])
    assert "|  |" in table
    assert "on 2 to 7 test images" in table


# The mark


class _View:
    """Stands for a task's view: segments by a function of the picture's number."""

    def __init__(self, labels):
        self.labels = labels

    def segment(self, model, num_classes, precision):
        def logits(image):
            labels = torch.from_numpy(self.labels(image)).long()
            return torch.nn.functional.one_hot(labels, num_classes).permute(2, 0, 1).float()

        return logits


class _Task:
    precision = "float32"

    def __init__(self, pictures, labels):
        self.parts = {"test": pictures}
        self.classes = pictures.classes
        self.view = _View(labels)
        self.test_set = [type("Item", (), {"image": index}) for index in range(len(pictures))]


@pytest.fixture(scope="module")
def pictures() -> LetterImages:
    return open_letters({"side": 256, "test_images": 3}).test


def test_a_perfect_segmenter_obeys_the_mark(pictures):
    found = measure_mark(None, _Task(pictures, lambda index: pictures[index].labels))
    letters = [letter for index in range(3) for letter in pictures.picture(index).letters]
    assert found["obeyed"] == 1.0
    assert found["named"] == 1.0
    bands = found["bands"]
    assert sum(band["count"] for band in bands) == sum(letter.counts for letter in letters)
    assert sum(band["count"] + band["not_count"] for band in bands) == len(letters)
    near = [letter for letter in letters if letter.distance < BAND]
    assert bands[0]["count"] + bands[0]["not_count"] == len(near)


def test_who_cannot_see_the_mark_obeys_half_of_it(pictures):
    nothing = measure_mark(None, _Task(pictures, lambda index: np.zeros((256, 256), np.uint8)))
    assert nothing["obeyed"] == 0.5
    assert nothing["named"] == 0.0
    everything = measure_mark(None, _Task(pictures, lambda index: np.ones((256, 256), np.uint8)))
    assert everything["obeyed"] == 0.5
    assert 0 < everything["named"] < 0.5


def test_the_mark_is_of_letters_alone():
    with pytest.raises(TypeError, match="the test pictures are list, not LetterImages"):
        measure_mark(None, type("Task", (), {"parts": {"test": []}}))


# Larger pictures


@pytest.fixture(scope="module")
def small_pictures() -> LetterImages:
    return open_letters({"side": 64, "glyph": 16, "test_images": 1}).test


@pytest.mark.slow
def test_a_perfect_segmenter_is_perfect_on_larger_pictures(small_pictures):
    task = _Task(small_pictures, None)
    task.statistics = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    seen = []

    def labels(image):
        """It knows a picture by its size and its turn."""
        side = image.shape[-1]
        mark = small_pictures.settings.mark_side
        settings = replace(small_pictures.settings, side=side, mark=mark)
        shown = balanced(replace(small_pictures, settings=settings), 1)
        seen.append(side)
        return shown[seen.count(side) - 1].labels

    task.view = _View(labels)
    assert measure_larger(None, task) == {"2": 1.0, "4": 1.0, "8": 1.0}
    assert seen == [128] * 4 + [256] * 4 + [512] * 4
    task.view = _View(lambda image: np.zeros(image.shape[1:], np.uint8))
    found = measure_larger(None, task)
    assert all(0 < each < 0.1 for each in found.values())  # the background alone


@pytest.mark.parametrize(("asked", "shown"), [(0, 4), (3, 4), (8, 8), (11, 8)])
def test_larger_pictures_have_the_mark_everywhere(small_pictures, asked, shown):
    subset = balanced(small_pictures, asked)
    pictures = [small_pictures.picture(index) for index in subset.indices]
    assert len(subset) == len(set(subset.indices)) == shown
    corners = Counter(picture.mark for picture in pictures)
    assert sorted(corners.values()) == 4 * [shown // 4]
    assert sum(picture.ink for picture in pictures) == shown // 2
    for place, picture in enumerate(pictures):
        assert np.array_equal(subset[place].labels, picture.labels())


def test_there_is_an_end_to_larger_pictures(pictures):
    own = replace(pictures, settings=replace(pictures.settings, side=LARGEST // 2 + 1), images=1)
    assert measure_larger(None, _Task(own, None)) == {}


# The picture


def test_the_picture_has_curves_of_every_model_by_the_given_seconds(make_result):
    history = {
        name: [1, 2, 3] for name in ("update", "epoch", "seconds", "test_loss", "test_accuracy")
    }
    history["test_accuracy"] = [0.1, 0.2, 0.4]
    band = {"count": 40, "shown": 32, "not_count": 40, "hidden": 24}
    measures = {"images": [4, 8, 12], "bands": [band, {**band, "count": 19}]}
    own = [
        make_result(
            f"{name}{suffix}",
            seed,
            1.0,
            0.4,
            sweep=SWEEP.name,
            history=json.dumps(history),
            measures=json.dumps(measures),
        )
        for name in LABELS
        for suffix in ("-512", "-512-images")
        for seed in (0, 1)
        if f"{name}{suffix}" in SWEEP.by_name
    ]
    figure = letter_figure(SWEEP, own)
    above, below = figure.axes[:3], figure.axes[3]
    assert [axis.get_xlabel() for axis in above] == [
        "seconds of training, one thread",
        "seconds of training, one thread",
        "images seen",
    ]
    assert len(above[1].lines) == 3 * (len(LABELS) - len(COMPARED) + 1)  # Vittt and its variants
    named = {f"{LABELS[model]} (12 images)" for model in COMPARED}
    lines = [line.get_label() for line in above[0].lines]
    assert {label for label in lines if not label.startswith("_")} == named
    assert len(lines) == 3 * len(COMPARED)  # two seeds and their mean
    seconds = SWEEP.by_name["vittt-512"].length
    assert isinstance(seconds, GivenSeconds)
    line = above[0].lines[0]
    assert line.get_xdata()[-1] == seconds.seconds
    assert list(line.get_ydata()) == pytest.approx([10, 20, 40])
    assert list(above[2].lines[0].get_xdata()) == [4, 8, 12]
    (obeyed,) = below.lines[0].get_ydata()  # the band of few letters is left out
    assert obeyed == pytest.approx(70)

    first = SWEEP.only([SWEEP.panels[0].title])
    drawn = [result for result in own if result.row in first.by_name]
    assert len(letter_figure(first, drawn).axes) == 2


def test_a_deit_made_linear_starts_from_the_deit(tmp_path: Path):
    sweep = SWEEPS["linearize-letters"]
    configs = {row.name: sweep.config(row, 0, tmp_path) for row in sweep.rows}
    weights = str(tmp_path / "deit" / "seed-0" / "last.safetensors")
    assert {name for name, config in configs.items() if config.model.initial_weights} == {
        name for name in configs if name != "deit" and "scratch" not in name
    }
    assert configs["vit3-10"].model.initial_weights == weights
    assert configs["deit-large"].data.root_options["side"] == 512


@pytest.mark.parametrize("row", ["deit", "swiglu-large"])
def test_a_run_of_a_linearised_deit_is_measured_on_larger_pictures(tmp_path, monkeypatch, row):
    sweep = SWEEPS["linearize-letters"]
    monkeypatch.setattr(linearize_letters, "TIMED_SIDE", 64)
    monkeypatch.setattr(linearize, "cpu_seconds_of_an_update", lambda config: 0.5)
    own = sweep.config(sweep.by_name[row], 0, tmp_path)
    options = {**own.data.root_options, "train_images": 8, "test_images": 1}
    shape = {"depth": 1, "embed_dim": 32, "num_heads": 1}
    small = {"updates": 1, "warmup": 0, "batch_size": 1, "initial_weights": None}
    small |= {"arguments": shape, "evaluate_every": 1, "data.root_options": options}
    task = Task(sweep.name, row, change(own, small), ("studies",), sweep.examine, sweep.accuracy)
    result = perform(task)
    assert 0 <= result.measured["on_larger"] <= 1
    assert result.measured["seconds_of_a_picture"] > 0
    assert result.measured["cpu_seconds_of_an_update"] == 0.5
    if row != "deit":  # its pictures are the larger ones
        assert result.measured["on_larger"] == pytest.approx(result.test_accuracy)
