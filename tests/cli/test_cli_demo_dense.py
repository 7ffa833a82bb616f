"""`vision-ttt demo-dense`, cut short: scenes, runs that are not repeated, one page of all."""

import csv
import json
import re
from pathlib import Path

import pytest

from vision_ttt.cli import demo_dense
from vision_ttt.cli.main import main
from vision_ttt.demo_dense.results import Finished, find_finished
from vision_ttt.demo_dense.runs import GOALS, MODELS, RECIPES, STARTS, scene_run, with_starts
from vision_ttt.demo_dense.tables import by_class, compare
from vision_ttt.engine.config import ConfigError
from vision_ttt.recipes import load

SIZE = ["--train_images", "16", "--test_images", "4", "--train_objects", "64"]
SIZE += ["--test_objects", "40", "--updates", "1"]


def _demo(output: Path, *arguments: str) -> int:
    return main(["demo-dense", "--output", str(output), *SIZE, *arguments])


def _rows(output: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((output / "results.csv").read_text().splitlines()))


def test_demo_trains_once_and_writes_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo_dense, "report", lambda trained: _draw(trained.run_dir))
    assert _demo(tmp_path, "--tasks", "segmentation") == 0
    assert "mean IoU" in capsys.readouterr().out
    first, row = _rows(tmp_path)
    assert (first["task"], first["train_images"], first["side"]) == ("classification", "64", "48")
    assert 0 <= float(first["accuracy"]) <= 1
    assert (row["task"], row["model"], row["seed"]) == ("segmentation", "vittt", "0")
    assert (row["train_images"], row["test_images"], row["updates"]) == ("16", "4", "1")
    assert 0 <= float(row["miou"]) <= 1
    assert row["box_ap"] == ""
    assert int(row["maps_macs"]) > 100_000_000
    assert int(row["maps_parameters"]) < int(row["parameters"]) < 2_000_000
    assert "vision-ttt demo-dense --output" in row["command"]
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 7  # curves for wide and for narrow screens
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    for told in ("Segmentation by class", "triangle", "≥ 80 (goal 90)", "patch_size: 8"):
        assert told in page

    monkeypatch.setattr(demo_dense, "train", None)  # nothing is to be trained again
    (tmp_path / "report.html").unlink()
    assert _demo(tmp_path, "--tasks", "segmentation") == 0
    assert _rows(tmp_path) == [first, row]
    assert (tmp_path / "report.html").read_text() == page


def _draw(folder: Path) -> None:
    for name in ("overlays", "confusion"):
        (folder / f"{name}.png").write_bytes(b"\x89PNG")


def test_scenes_alone(tmp_path):
    assert _demo(tmp_path, "--render_only", "true") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scenes", "sheet.png"]
    assert len(list((tmp_path / "scenes/coco/train2017").iterdir())) == 16


def test_other_scenes_are_refused(tmp_path, capsys):
    assert _demo(tmp_path, "--render_only", "true") == 0
    assert _demo(tmp_path, "--train_images", "9") == 2
    assert "train_images 16 (not 9)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tasks", "pose"], "pose"),
        (["--models", "resnet"], "resnet"),
        (["--seeds", "0"], "seeds"),
        (["--updates", "0"], "updates"),
    ],
)
def test_bad_arguments_are_named(tmp_path, capsys, arguments, told):
    assert _demo(tmp_path, *arguments) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("task", RECIPES)
def test_models_differ_in_the_backbone_alone(tmp_path, task):
    vittt, deit = (scene_run(task, model, 2, tmp_path / "scenes", tmp_path, {}) for model in MODELS)
    assert deit.model.name.startswith("deit")
    assert deit.model.arguments["patch_size"] == vittt.model.arguments["patch_size"] == 8
    if task in STARTS:
        weights = Path(vittt.model.initial_weights)
        assert weights.parent == tmp_path / STARTS[task] / "vittt/seed-2"
    assert (vittt.task, vittt.data, vittt.optimisation) == (deit.task, deit.data, deit.optimisation)
    assert vittt.run.seed == deit.run.seed == 2
    assert vittt.run.output != deit.run.output


def test_recipes_train_without_the_demo():
    for task, recipe in RECIPES.items():
        config = load(recipe, {})
        assert config.task.name == task
        place = config.data.dataset if task == "classification" else config.data.root
        assert place.startswith("runs/demo-dense/scenes")


def test_tasks_come_with_those_that_they_start_from():
    assert with_starts(["detection"]) == list(RECIPES)
    assert with_starts(["segmentation"]) == ["classification", "segmentation"]
    assert with_starts(["classification"]) == ["classification"]


def test_unknown_field_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nonsense"):
        scene_run("detection", "vittt", 0, tmp_path, tmp_path, {"nonsense": 1})


@pytest.mark.slow
def test_both_tasks_beside_another_model(tmp_path):
    assert _demo(tmp_path, "--models", "vittt", "deit") == 0
    rows = _rows(tmp_path)
    assert [(row["task"], row["model"]) for row in rows] == [
        (task, model) for task in RECIPES for model in MODELS
    ]
    assert all(row["mask_ap50"] for row in rows if row["task"] == "detection")
    page = (tmp_path / "report.html").read_text()
    assert "Detection: precision recall, deit" in page
    for task in RECIPES:
        runs = [_finished(tmp_path, task, model) for model in MODELS]
        assert len(compare(task, runs).lines) == 3
        assert [line[0] for line in by_class(task, runs).lines] == [
            row["class"] for row in runs[0].classes
        ]


def _finished(output: Path, task: str, model: str) -> Finished:
    config = scene_run(task, model, 0, output / "scenes", output, {"updates": 1})
    finished = find_finished(config)
    assert finished is not None
    return finished


@pytest.mark.slow
@pytest.mark.parametrize("task", RECIPES)
def test_demo_reaches_what_is_asked_for(tmp_path, task):
    assert main(["demo-dense", "--output", str(tmp_path), "--tasks", task]) == 0
    metrics = json.loads((tmp_path / task / "vittt/seed-0/metrics.json").read_text())
    for goal in GOALS[task]:
        assert metrics[f"test_{goal.metric}"] >= goal.bar
