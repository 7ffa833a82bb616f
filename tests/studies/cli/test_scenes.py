"""`python -m studies scenes`, cut short: rows, a page of all, runs that are not repeated."""

import csv
import re
from pathlib import Path

import pytest
import torch

from studies.cli import scenes
from studies.main import main
from studies.scenes import MODELS
from studies.scenes.results import Finished, SceneResult, find_finished, save_finished
from studies.scenes.tables import by_class, compare
from vision_ttt.bench.machine import describe_run
from vision_ttt.demo_dense import RECIPES, scene_run
from vision_ttt.recipes import change

SIZE = ["--train_images", "16", "--test_images", "4", "--train_objects", "64"]
SIZE += ["--test_objects", "40", "--updates", "1"]


def _compare(output: Path, *arguments: str) -> int:
    return main(["scenes", "--output", str(output), *SIZE, *arguments])


def _rows(output: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((output / "results.csv").read_text().splitlines()))


def test_it_trains_once_and_writes_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scenes, "report", lambda trained: _draw(trained.run_dir))
    assert _compare(tmp_path, "--tasks", "classification") == 0
    assert "accuracy" in capsys.readouterr().out
    rows = _rows(tmp_path)
    assert [(row["task"], row["model"], row["seed"]) for row in rows] == [
        ("classification", model, "0") for model in MODELS
    ]
    row = rows[0]
    assert (row["train_images"], row["test_images"], row["side"]) == ("64", "40", "48")
    assert 0 <= float(row["accuracy"]) <= 1
    assert row["box_ap"] == ""
    assert int(row["maps_macs"]) > 10_000_000
    assert int(row["maps_parameters"]) == int(row["parameters"]) < 2_000_000
    assert "studies scenes --output" in row["command"]
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4  # curves for wide and for narrow screens
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    for told in ("Classification by class", "triangle", "≥ 85 (goal 95)", "patch_size: 8"):
        assert told in page

    monkeypatch.setattr(scenes, "train", None)  # nothing is to be trained again
    (tmp_path / "report.html").unlink()
    assert _compare(tmp_path, "--tasks", "classification") == 0
    assert _rows(tmp_path) == rows
    assert (tmp_path / "report.html").read_text() == page


def _draw(folder: Path) -> None:
    (folder / "confusion.png").write_bytes(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "told"), [(["--models", "resnet"], "resnet"), (["--seeds", "0"], "seeds")]
)
def test_bad_arguments_are_named(tmp_path, capsys, arguments, told):
    assert _compare(tmp_path, *arguments) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("task", RECIPES)
def test_models_differ_in_the_backbone_alone(tmp_path, task):
    vittt, deit = (scene_run(task, tmp_path, MODELS[model], model=model) for model in MODELS)
    assert deit.model.name.startswith("deit")
    assert deit.model.arguments["patch_size"] == vittt.model.arguments["patch_size"] == 8
    assert (vittt.task, vittt.data, vittt.optimisation) == (deit.task, deit.data, deit.optimisation)
    assert vittt.run.output != deit.run.output


@pytest.mark.parametrize("task", RECIPES)
def test_a_run_in_a_moved_folder_is_finished(tmp_path, task):
    former, config = (scene_run(task, tmp_path / name, {}) for name in ("former", "moved"))
    run = describe_run([], torch.device("cpu"))
    values = dict.fromkeys(SceneResult.__dataclass_fields__, "") | {"run": run}
    Path(former.run.output).mkdir(parents=True)
    save_finished(former, SceneResult(**values), [], [])
    assert find_finished(config) is None
    (tmp_path / "former").rename(tmp_path / "moved")
    found = find_finished(config)
    assert found is not None
    assert found.folder == Path(config.run.output)
    assert find_finished(change(config, {"seed": 5})) is None


@pytest.mark.slow
def test_all_tasks(tmp_path):
    assert _compare(tmp_path) == 0
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
    config = scene_run(task, output, {**MODELS[model], "updates": 1}, model=model)
    finished = find_finished(config)
    assert finished is not None
    return finished
