"""kill -9 at any moment, also while a checkpoint is written: the resumed run is the same run."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from interrupted_runs import assert_same_run, run_through
from vision_ttt.cli.main import main
from vision_ttt.engine import CheckpointError, ConfigError, train
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.engine.state import SavedRun, read_state, save_state
from vision_ttt.engine.tensor_files import read_tensors, write_tensors
from vision_ttt.recipes import change, resolve
from vision_ttt.tasks import load_model

Fields = Callable[..., dict]
EVERYTHING = {
    "ema_decay": 0.9,
    "mixup": 0.8,
    "cutmix": 1.0,
    "auto_augment": "rand-m9-mstd0.5-inc1",
    "random_erasing": 0.25,
    "layer_decay": 0.7,
    "accumulation_steps": 2,
}


def test_killed_while_writing(tiny_fields: Fields, tmp_path: Path) -> None:
    options = {**EVERYTHING, "checkpoint_every": 1, "batch_size": 8, "epochs": 2}
    train(resolve(tiny_fields(**options, output=str(tmp_path / "whole"))))
    # Descriptions first (6 moments), then per update weights and state, 3 moments each: sync,
    # rename, sync of the folder; best.safetensors at an epoch's end comes before them.
    kills = [0, [0, "half"], 4, 6, [6, "half"], 7, 8, 9, [9, "half"], 10, 11, [12, "half"], 13, 15]
    killed = tmp_path / "killed"
    fields = tiny_fields(**options, output=str(killed))
    (deaths,), said = run_through([(fields, kills)], tmp_path)
    assert deaths >= len(kills) - 2
    assert "is damaged" not in said  # a part of a file never got a checkpoint's name
    assert_same_run(tmp_path / "whole", killed)
    assert not list(killed.rglob("*.part"))


@pytest.mark.slow
def test_killed_from_outside_at_some_time(tiny_fields: Fields, tmp_path: Path) -> None:
    options = {**EVERYTHING, "checkpoint_every": 2, "epochs": 8, "num_workers": 1}
    train(resolve(tiny_fields(**options, output=str(tmp_path / "whole"))))
    fields = tiny_fields(**options, output=str(tmp_path / "killed"))
    (deaths,), said = run_through([(fields, ["0.0", "0.05", "0.12", "0.2"])], tmp_path)
    assert deaths >= 3
    assert "is damaged" not in said
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    tiny_fields: Fields,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    no_report: None,
) -> None:
    options = {"ema_decay": 0.9, "checkpoint_every": 3}
    config = resolve(tiny_fields(**options, output=str(tmp_path / "run")))
    train(config)
    whole = tmp_path / "whole"
    (tmp_path / "run").rename(whole)
    train(config)
    newest, before = checkpoints(tmp_path / "run")
    assert (newest.stem[-2:], before.stem[-2:]) == ("08", "06")
    _flip_a_bit(newest)
    recipe = tmp_path / "run" / "config.yaml"
    assert main(["train", str(recipe), "--resume", "auto"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert newest.name in said
    assert f"going on from {before.name}" in said
    assert "epoch 2/2" in said
    assert_same_run(whole, tmp_path / "run")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "somebody's").write_text("kept")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _broken_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _looping_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _with(change: Callable[[SavedRun], object]) -> Callable[[Path], None]:
    """Damage by writing the state anew, changed, with a hash that is right."""

    def damage(path: Path) -> None:
        saved = read_state(path)
        change(saved)
        save_state(path, saved)

    return damage


_DAMAGES = {
    "a part": _truncate,
    "nothing": _empty,
    "a folder": _folder,
    "a FIFO": _fifo,
    "a broken link": _broken_link,
    "a looping link": _looping_link,
    "no weight": _with(lambda saved: saved.model.pop("head.weight")),
    "a weight too many": _with(lambda saved: saved.model.update(other=torch.zeros(1))),
    "a weight's shape": _with(lambda saved: saved.model.update({"head.bias": torch.zeros(3)})),
    "no average": _with(lambda saved: saved.average.clear()),
    "a moment's shape": _with(
        lambda saved: saved.moments.update({"head.bias/exp_avg": torch.zeros(5)})
    ),
    "no moment": _with(lambda saved: saved.moments.pop("head.bias/exp_avg")),
    "an unknown moment": _with(lambda saved: saved.moments.update({"x/step": torch.zeros(())})),
    "an unknown part": lambda path: write_tensors(
        path, {"else/x": torch.zeros(1)}, read_tensors(path)[1]
    ),
    "a negative count": _with(lambda saved: setattr(saved.state, "update", -1)),
}


def test_whatever_stands_for_the_newest_checkpoint_the_one_before_is_taken(
    tiny_fields: Fields, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"ema_decay": 0.9, "checkpoint_every": 7}
    config = resolve(tiny_fields(**options))
    whole = train(config).run_dir
    for name, damage in _DAMAGES.items():
        run = tmp_path / name
        shutil.copytree(whole, run)
        newest, before = checkpoints(run)
        assert (newest.stem[-2:], before.stem[-2:]) == ("08", "07")
        damage(newest)
        caplog.clear()
        train(change(config, {"output": str(run)}), resume="auto")
        assert f"going on from {before.name}" in caplog.text, name
        assert str(newest) in caplog.text, name
        assert newest.is_file(), name
        assert not newest.is_symlink(), name
        assert_same_run(whole, run)
    aside = tmp_path / "a folder" / "checkpoints" / "update-000000008.safetensors.aside-1"
    assert (aside / "somebody's").read_text() == "kept"


def test_a_checkpoint_of_another_config_is_not_passed_over(tiny_fields: Fields) -> None:
    config = resolve(tiny_fields(checkpoint_every=7))
    train(config)
    newest, _ = found = checkpoints(Path(config.run.output))
    _with(lambda saved: saved.state.config["run"].update(seed=5))(newest)
    with pytest.raises(ConfigError, match=r"another config: run\.seed 5 -> 0"):
        train(config, resume="auto")
    assert checkpoints(Path(config.run.output)) == found


def test_a_folder_of_checkpoints_that_is_none(tiny_fields: Fields) -> None:
    config = resolve(tiny_fields())
    for stands in (lambda path: path.write_text(""), lambda path: path.symlink_to(path.name)):
        run = Path(config.run.output)
        run.mkdir()
        stands(run / "checkpoints")
        with pytest.raises(OSError, match="checkpoints"):  # rather than start anew
            train(config, resume="auto")
        shutil.rmtree(run)


def test_no_whole_checkpoint_is_an_error_and_not_a_new_start(tiny_fields: Fields) -> None:
    config = resolve(tiny_fields(checkpoint_every=2))
    train(config)
    found = checkpoints(Path(config.run.output))
    for path in found:
        _truncate(path)
    for resume in (True, "auto"):
        with pytest.raises(CheckpointError, match=rf"{found[0].name}.*{found[1].name}"):
            train(config, resume=resume)


def test_auto_starts_where_there_is_nothing_and_goes_on_where_there_is(
    tiny_fields: Fields, capsys: pytest.CaptureFixture[str], tmp_path: Path, no_report: None
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(resolve(tiny_fields()).as_dict()))
    for has_run in (False, True):
        assert main(["train", str(recipe), "--resume", "auto"]) == 0
        assert ("epoch 1/2" in capsys.readouterr().err) != has_run


def test_the_newest_checkpoints_are_kept_and_the_best_weights(tiny_fields: Fields) -> None:
    config = resolve(tiny_fields(epochs=4, checkpoint_every=1, keep_checkpoints=3))
    result = train(config)
    numbers = [int(path.stem.rpartition("-")[2]) for path in checkpoints(result.run_dir)]
    assert numbers == [16, 15, 14]
    _, best = load_model(result.run_dir / "best.safetensors")
    accuracies = [row["test_accuracy"] for row in result.metrics["history"]]
    assert best.metrics["test_accuracy"] == max(accuracies) == result.metrics["best_test_accuracy"]
    assert best.epoch == accuracies.index(max(accuracies)) + 1
