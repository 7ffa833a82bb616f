"""What damage must not do: crash a report, lose a former run, or pass for a result."""

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vision_ttt.cli.main import main
from vision_ttt.cli.run_report import write_page
from vision_ttt.data import DatasetError, ImageError
from vision_ttt.engine import ConfigError, train
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.engine.state import read_state
from vision_ttt.errors import DamagedItem, suggestions
from vision_ttt.recipes import change, resolve
from vision_ttt.tasks.classification.report import _decodable, panels_of
from vision_ttt.tasks.figures import learning_curves

Fields = Callable[..., dict]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


@pytest.mark.parametrize("mixup", [0.0, 0.5])
def test_batches_of_damaged_items_are_passed_over(
    tiny_fields: Fields, image_folder: Path, mixup: float
) -> None:
    """Whole batches in training and in test, and one that mixup finds a single image in."""
    for index in range(5):
        _truncate(image_folder / "train" / "dark" / f"{index}.png")
    for index in range(3):
        _truncate(image_folder / "val" / "dark" / f"{index}.png")
    fields = tiny_fields(batch_size=2, mixup=mixup, skip_bad=True)
    result = train(resolve(fields))
    assert len(result.evaluation.targets) == 5
    assert result.metrics["history"][-1]["update"] == 16  # 8 updates an epoch, as without damage
    assert all(row["train_loss"] > 0 for row in result.metrics["history"])


@pytest.mark.parametrize(
    "command", ["train", *(pytest.param(x, marks=pytest.mark.slow) for x in ("eval", "predict"))]
)
def test_a_damaged_item_ends_commands_with_worker_processes(
    tiny_fields: Fields, image_folder: Path, tmp_path: Path, command: str
) -> None:
    """In a process of their own: what is left at its exit kept it from ending."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(resolve(tiny_fields(batch_size=2)).as_dict()))
    given = ["train", str(recipe), "--output", str(tmp_path / "other")]
    if command != "train":
        weights = str(train(resolve(tiny_fields(epochs=1))).run_dir / "last.safetensors")
        folder = str(image_folder / "val")
        given = {
            "eval": ["eval", weights],
            "predict": ["predict", folder, "--checkpoint", weights],
        }[command]
    for part in ("train", "val"):
        _truncate(image_folder / part / "dark" / "1.png")
    ended = subprocess.run(
        [sys.executable, "-m", "vision_ttt", *given, "--num-workers", "2"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "1.png" in ended.stderr
    assert ended.returncode == 2, ended.stderr


def test_every_checkpoint_has_the_damaged_items_of_all_processes(
    tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The module hides behind its function of the same name.
    module = sys.modules["vision_ttt.engine.train"]
    monkeypatch.setattr(module, "all_names", lambda names: [*names, "met by another process"])
    run_dir = train(resolve(tiny_fields(epochs=1, checkpoint_every=3))).run_dir
    _, before_the_evaluation = checkpoints(run_dir)
    named = read_state(before_the_evaluation).state.damaged_items
    assert named == ["met by another process"]


def test_links_to_nothing_are_damaged_items(tiny_fields: Fields, image_folder: Path) -> None:
    lost = image_folder / "train" / "dark" / "0.png"
    lost.unlink()
    lost.symlink_to("nowhere.png")
    with pytest.raises(DamagedItem, match="no such file"):
        train(resolve(tiny_fields()))
    result = train(resolve(tiny_fields(skip_bad=True)), overwrite=True)
    assert result.metrics["history"]


def test_a_run_goes_on_with_as_many_items_as_it_began(
    tiny_fields: Fields, image_folder: Path
) -> None:
    train(resolve(tiny_fields()))
    first = image_folder / "train" / "dark" / "0.png"
    shutil.copy(first, first.with_name("more.png"))
    with pytest.raises(ConfigError, match="began with 16 training items, but the data now have 17"):
        train(resolve(tiny_fields()), resume=True)


def test_a_run_goes_on_with_the_items_held_out_that_it_began_with(
    tiny_fields: Fields, image_folder: Path
) -> None:
    fields = tiny_fields(dataset=str(image_folder / "train"))
    train(resolve(fields))
    first = image_folder / "train" / "dark" / "0.png"
    first.rename(first.with_name("renamed.png"))
    with pytest.raises(ConfigError, match="the run held out other items"):
        train(resolve(fields), resume=True)


def test_a_training_set_without_a_good_image(tiny_fields: Fields, image_folder: Path) -> None:
    for path in (image_folder / "train").rglob("*.png"):
        _truncate(path)
    with pytest.raises(DatasetError, match="not one of the training images can be read"):
        train(resolve(tiny_fields(skip_bad=True)))


def test_evaluations_between_which_no_image_was_good(
    tiny_fields: Fields, image_folder: Path
) -> None:
    for label in ("dark", "light"):
        for index in range(6):
            _truncate(image_folder / "train" / label / f"{index}.png")
    fields = tiny_fields(batch_size=2, epochs=1, evaluate_every=1, skip_bad=True)
    result = train(resolve(fields))
    losses = [row["train_loss"] for row in result.metrics["history"]]
    assert len(losses) == 8
    assert 4 <= losses.count(None) < 8  # four good images in eight batches
    history = result.metrics["history"]
    assert learning_curves(history, panels_of(history)).axes


def test_an_epoch_without_a_good_image_ends_a_run_that_is_evaluated_in_its_course(
    tiny_fields: Fields, image_folder: Path
) -> None:
    for path in (image_folder / "train").rglob("*.png"):
        _truncate(path)
    config = resolve(tiny_fields(epochs=4, skip_bad=True, evaluate_every=1))
    with pytest.raises(DatasetError, match="not one of the training images can be read"):
        train(config)
    rows = (Path(config.run.output) / "metrics.csv").read_text().splitlines()[1:]
    assert len(rows) == 3  # of the epoch's four updates


def test_the_report_shows_each_image_under_its_own_title(
    tiny_fields: Fields, image_folder: Path
) -> None:
    _truncate(image_folder / "val" / "dark" / "0.png")
    result = train(resolve(tiny_fields(epochs=1, skip_bad=True)))
    places = _decodable(result.task, len(result.evaluation.targets))
    assert list(places) == [1, 2, 3, 4, 5, 6, 7]
    targets = [result.task.test_set[place][1] for place in places]
    assert targets == result.evaluation.targets.tolist()
    assert write_page(result, result.task.report(result)).exists()


@pytest.mark.parametrize(
    "error", [DamagedItem("vector 3 holds text", "vector 3"), ImageError("a.png", "truncated")]
)
def test_the_error_of_an_item_comes_whole_out_of_a_worker(error: DamagedItem) -> None:
    received = pickle.loads(pickle.dumps(error))
    assert type(received) is type(error)
    assert (str(received), received.name) == (str(error), error.name)


def test_a_run_without_its_checkpoints_is_set_aside(tiny_fields: Fields) -> None:
    config = resolve(tiny_fields(epochs=1))
    run_dir = train(config).run_dir
    train(change(config, {"seed": 1}), overwrite=True)
    weights = (run_dir / "last.safetensors").read_bytes()
    shutil.rmtree(run_dir / "checkpoints")
    train(change(config, {"seed": 2}), overwrite=True)
    assert (run_dir / "former" / "last.safetensors").read_bytes() == weights
    (run_dir / "config.yaml").unlink()  # as if its move had been interrupted
    train(config, overwrite=True)
    assert not (run_dir / "former" / "config.yaml").exists()


def test_files_that_are_no_run_are_not_overwritten(tiny_fields: Fields, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    (tmp_path / "run" / "config.yaml").write_text("of: another program")
    with pytest.raises(ConfigError, match="run holds files, but no run to overwrite"):
        train(resolve(tiny_fields(epochs=1)), overwrite=True)
    assert (tmp_path / "run" / "thesis.txt").read_text() == "years of work"


def test_an_overwritten_run_is_set_aside(tiny_fields: Fields, image_folder: Path) -> None:
    config = resolve(tiny_fields(epochs=1))
    run_dir = train(config).run_dir
    (run_dir / "report.html").touch()
    weights = (run_dir / "last.safetensors").read_bytes()
    path = image_folder / "train" / "dark" / "0.png"
    whole = path.read_bytes()
    _truncate(path)
    for _ in range(2):  # the second attempt does not replace what the first has set aside
        with pytest.raises(ImageError):
            train(config, overwrite=True)
    assert (run_dir / "former" / "last.safetensors").read_bytes() == weights
    assert (run_dir / "former" / "report.html").exists()
    assert not (run_dir / "report.html").exists()
    assert not (run_dir / "last.safetensors").exists()
    path.write_bytes(whole)
    train(change(config, {"seed": 1}), overwrite=True)
    assert (run_dir / "last.safetensors").read_bytes() != weights


def test_weights_that_are_not_finite_predict_nothing(
    tiny_fields: Fields, image_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = train(resolve(tiny_fields(epochs=1))).run_dir / "last.safetensors"
    with safe_open(path, "pt") as file:
        metadata = {"vision_ttt": file.metadata()["vision_ttt"]}
    weights = load_file(path)
    weights["head.bias"][0] = float("nan")
    save_file(weights, path, metadata)
    image = image_folder / "val" / "dark" / "0.png"
    assert main(["predict", str(image), "--checkpoint", str(path), "--json"]) == 2
    said = capsys.readouterr()
    assert "predicts NaN" in said.err
    assert not said.out


def test_a_folder_of_one_class(tiny_fields: Fields, image_folder: Path) -> None:
    single = image_folder / "train"
    shutil.rmtree(single / "light")
    with pytest.raises(DatasetError, match=r"one class folder, dark; at least 2"):
        train(resolve(tiny_fields(dataset=str(single))))


def test_suggestions_are_short_and_look_among_names_that_begin_alike() -> None:
    told = suggestions("zzz", [f"name{i:02}" for i in range(50)])
    assert told.startswith("accepted: name00, ")
    assert told.endswith("name11, …")
    assert suggestions("--fold", ["--folder", "--model"]) == "nearest: --folder"
    with pytest.raises(ValueError, match="nearest: vittt_"):
        train(resolve({"task": "classification", "model": "vittt_tni"}))
