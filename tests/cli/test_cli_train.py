"""`vision-ttt train`: what is trained is said, and what cannot be is one line and exit code 2."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from vision_ttt import recipes
from vision_ttt.cli.arguments import train
from vision_ttt.cli.main import main
from vision_ttt.cli.parser import CommandParser
from vision_ttt.cli.run_report import data_wait
from vision_ttt.engine import locks
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.engine.state import read_state
from vision_ttt.recipes import resolve

Said = pytest.CaptureFixture[str]
Fields = Callable[..., dict]


@pytest.fixture
def recipe(tiny_fields: Fields, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(resolve(tiny_fields(epochs=10, warmup=5)).as_dict()))
    return path


@pytest.mark.parametrize(
    ("share", "workers", "told"),
    [
        (0.5, 1, "50.0%; machine.num_workers above 1 may reduce it"),
        (0.15, 1, "15.0%"),
        (0.5, 4, "50.0%"),  # as many as there are cores
    ],
)
def test_a_long_wait_for_data_names_what_may_reduce_it(
    monkeypatch: pytest.MonkeyPatch, share: float, workers: int, told: str
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert data_wait(share, workers) == told


def test_a_run_says_what_it_trains_and_what_it_changed(
    recipe: Path, capsys: Said, no_report: None
) -> None:
    output = Path(json.loads(recipe.read_text())["run"]["output"])
    flags = ["--arguments.design", "dual", "--arguments.depth", "2", "--epochs", "1"]
    assert main(["train", str(recipe), *flags]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "warmup: 0.5 instead of the recipe's 5, as epochs are 1 instead of 10"
    told = "training vittt_nano_patch4_32 with depth 2, embed_dim 32, num_heads 1,"
    assert said[1].startswith(told + " design dual, drop_path 0.1: ")
    assert said[1].endswith(" parameters")
    config = yaml.safe_load((output / "config.yaml").read_text())
    arguments = {"depth": 2, "embed_dim": 32, "num_heads": 1, "design": "dual"}
    assert config["model"]["arguments"] == arguments
    # What was trained is what weights are said to be of.
    weights = ["--initial_weights", str(output / "last.safetensors"), "--overwrite"]
    same = ["--arguments.design", "dual", "--arguments.depth", "2"]
    argv = ["train", str(recipe), "--epochs", "1", "--frozen_layers", "all"]
    assert main([*argv, *weights, *same, "--output", f"{output}-2"]) == 0
    said = capsys.readouterr().err
    assert "frozen" in said.splitlines()[1]
    assert "with depth 2, embed_dim 32, num_heads 1, design dual: " in said
    assert "tensors taken." in said
    assert main([*argv, *weights, "--output", f"{output}-3"]) == 2
    assert "design dual" in capsys.readouterr().err


def test_a_recipe_is_read_once(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What decides the flags is what is trained, though the file be written to in between."""
    read, contents = recipes.files.read_regular, []

    def replaced(path: Path, largest: int) -> bytes:
        contents.append(read(path, largest))
        path.write_text("task: diffusion")
        return contents[-1]

    monkeypatch.setattr(recipes.files, "read_regular", replaced)
    parser = CommandParser("train", "train")
    train.add_arguments(parser)
    arguments = train.parse(parser, [str(recipe), "--mixup", "0.5"])
    train.check(arguments)
    assert len(contents) == 1
    assert arguments.stages[""].task.mixup == 0.5


def test_errors_of_an_existing_run_name_the_flags(
    recipe: Path, capsys: Said, no_report: None
) -> None:
    argv = ["train", str(recipe), "--epochs", "1"]
    assert main(argv) == 0
    capsys.readouterr()
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert (
        "give --resume auto to resume it, --overwrite to start a new run, or another --out" in said
    )
    assert main([*argv, "--resume", "auto", "--overwrite"]) == 2
    assert "--resume and --overwrite exclude each other" in capsys.readouterr().err
    run = Path(json.loads(recipe.read_text())["run"]["output"])
    with locks.alone_in(run, wait=False, lock=locks.LOCK_FILES[1]):
        assert main([*argv, "--resume", "auto"]) == 2
        assert "another run is at work in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--initial_weights", ""], "initial_weights is ''; it must be a non-empty string or null"),
        (["--initial_weights", "."], ". cannot be read: it is a folder, not a file"),
        (["--initial_weights", "none"], "No such checkpoint file"),
        (["--batch_size", "99999999999999999999"], "it must be at most that"),
        (["--num_workers", "99999999999999999999"], "it must be from 0 to 256"),
        (["--arguments.depth", "1000000"], "depth is 1000000"),
        (["--arguments.nonsense", "1"], "nonsense"),
        (["--image_size", "7"], "images of 7 × 7 are not whole patches of 4 × 4"),
        (["--image_size", "999999"], "it must be from 1 to 16,384"),
    ],
)
def test_a_wrong_value_is_one_line_and_makes_nothing(
    recipe: Path, capsys: Said, flags: list[str], told: str
) -> None:
    """More of such values are in the engine's test of what leaves no run directory."""
    assert main(["train", str(recipe), *flags]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert len(said.err.splitlines()) == 1
    assert not said.out
    assert not Path(json.loads(recipe.read_text())["run"]["output"]).exists()


@pytest.mark.parametrize(
    ("recipe", "flag"),
    [
        ("digits", "--objective"),
        ("digits", "--task.objective"),
        ("digits-diffusion", "--mixup"),
        ("digits-diffusion", "--label-smoothing"),
    ],
)
def test_a_flag_of_another_task_is_unknown(recipe: str, flag: str, capsys: Said) -> None:
    assert main(["train", recipe, flag, "1"]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"error: unknown flag {flag}; ")


@pytest.mark.parametrize("content", [b"epochs: \xff", b"a: " + b"[" * 100_000], ids=["utf", "deep"])
def test_a_hostile_recipe_is_one_line(content: bytes, tmp_path: Path, capsys: Said) -> None:
    path = tmp_path / "hostile.yaml"
    path.write_bytes(content)
    assert main(["train", str(path)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert str(path) in told


@pytest.mark.slow
def test_torchrun_ends_with_one_after_a_signal_though_the_checkpoint_is_whole(
    tiny_fields: Fields, tmp_path: Path
) -> None:
    fields = tiny_fields(epochs=10_000)
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(resolve(fields).as_dict()))
    command = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    process = subprocess.Popen(
        [sys.executable, *command, "-m", "vision_ttt", "train", str(path)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "epoch 1/" in line:
            break
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=100)[1]
    said = "".join(lines) + rest
    assert process.returncode == 1
    assert said.count("training vittt_nano_patch4_32 with depth 1") == 1  # one process speaks
    assert said.count("stopped after update") == 1
    assert "torchrun itself ends with 1 after a signal" in said
    state = read_state(checkpoints(Path(fields["output"]))[0]).state
    assert f"stopped after update {state.update} " in said
