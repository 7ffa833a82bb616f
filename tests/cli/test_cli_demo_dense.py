"""`vision-ttt demo-dense`, cut short: scenes, and runs that are not repeated."""

import json
from pathlib import Path

import pytest

from vision_ttt.cli import demo_dense
from vision_ttt.cli.main import main
from vision_ttt.demo_dense import RECIPES, STARTS, scene_run, with_starts
from vision_ttt.engine.config import ConfigError
from vision_ttt.recipes import load

SIZE = ["--train_images", "16", "--test_images", "4", "--train_objects", "64"]
SIZE += ["--test_objects", "40", "--updates", "1"]
ASKED = {"accuracy": 0.85, "box_ap50": 0.75, "mask_ap50": 0.65, "miou": 0.80}
"""Metric of a test set → what docs/dense.md gives as its target."""


def _demo(output: Path, *arguments: str) -> int:
    return main(["demo-dense", "--output", str(output), *SIZE, *arguments])


def test_demo_trains_once(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_dense, "report", lambda trained: _report(trained.run_dir))
    assert _demo(tmp_path, "--tasks", "segmentation") == 0
    first, second = (tmp_path / task / "vittt/seed-0" for task in list(RECIPES)[:2])
    assert 0 <= json.loads((first / "metrics.json").read_text())["test_accuracy"] <= 1
    assert 0 <= json.loads((second / "metrics.json").read_text())["test_miou"] <= 1
    assert not (tmp_path / "detection").exists()

    trained = []
    monkeypatch.setattr(demo_dense, "train", lambda config, **_: trained.append(config.run.output))
    monkeypatch.setattr(demo_dense, "report", lambda trained: None)
    assert _demo(tmp_path, "--tasks", "segmentation") == 0
    assert trained == []
    (second / "report.html").unlink()  # as killed before it was written
    assert _demo(tmp_path, "--tasks", "segmentation") == 0
    assert trained == [str(second)]


def _report(folder: Path) -> None:
    (folder / "report.html").touch()


def test_scenes_alone(tmp_path):
    assert _demo(tmp_path, "--render_only", "true") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scenes"]
    assert len(list((tmp_path / "scenes/coco/train2017").iterdir())) == 16


def test_other_scenes_are_refused(tmp_path, capsys):
    assert _demo(tmp_path, "--render_only", "true") == 0
    assert _demo(tmp_path, "--train_images", "9") == 2
    assert "train_images 16 (not 9)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tasks", "pose"], "pose"),
        (["--updates", "0"], "updates"),
    ],
)
def test_bad_arguments_are_named(tmp_path, capsys, arguments, told):
    assert _demo(tmp_path, *arguments) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("task", STARTS)
def test_runs_start_from_those_of_the_task_before(tmp_path, task):
    config = scene_run(task, tmp_path, {}, model="deit", seed=2)
    assert Path(config.model.initial_weights).parent == tmp_path / STARTS[task] / "deit/seed-2"
    assert config.run.output == str(tmp_path / task / "deit/seed-2")
    assert config.run.seed == 2


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
        scene_run("detection", tmp_path, {"nonsense": 1})


@pytest.mark.slow
def test_demo_reaches_what_is_asked_for(tmp_path):
    assert main(["demo-dense", "--output", str(tmp_path)]) == 0
    for task in RECIPES:
        metrics = json.loads((tmp_path / task / "vittt/seed-0/metrics.json").read_text())
        judged = [name for name in ASKED if f"test_{name}" in metrics]
        assert judged
        assert all(metrics[f"test_{name}"] >= ASKED[name] for name in judged)
