"""Checkpoints of sharded runs: killed at any moment, damaged, resumed on other processes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from interrupted_runs import assert_same_run, run_through
from vision_ttt.engine import train
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.recipes import resolve

Fields = Callable[..., dict]
# Without what each process draws for itself: drop path, mixed images.
OPTIONS = {
    "batch_size": 8,
    "accumulation_steps": 2,
    "epochs": 2,
    "drop_path": 0.0,
    "ema_decay": 0.9,
    "learning_rate": 5e-4,
    "checkpoint_every": 1,
    "sharding": "sharded",
}
# Process 0 alone writes. Its first moments are those of the descriptions (6); then for each
# checkpoint the weights and the state: synced, renamed, their folder synced.
KILLS = [
    10,  # just before the first checkpoint gets its name
    [9, "full"],  # both processes have to end
]


def test_a_sharded_run_is_killed_damaged_and_resumed_by_one_process(
    tiny_fields: Fields, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    fields = tiny_fields(**OPTIONS, keep_checkpoints=3, output=str(killed))
    runs = [({**fields, "output": str(whole)}, []), (fields, KILLS)]
    (_, deaths), said = run_through(runs, tmp_path, processes=2)
    assert deaths == len(KILLS)
    assert "is damaged" not in said  # a part of a checkpoint never got a checkpoint's name
    assert_same_run(whole, killed)
    assert [path.stem[-1] for path in checkpoints(killed)] == ["4", "3", "2"]
    assert not list(killed.rglob(".*"))
    # One process goes on from the last checkpoint but one, as the last is damaged.
    newest, _, _ = checkpoints(killed)
    _flip_a_bit(newest)
    train(resolve({**fields, "sharding": "replicated"}), resume=True)
    assert str(newest) in caplog.text
    assert "going on from update-000000003" in caplog.text
    assert_same_run(whole, killed, tolerance=1e-6)


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
def test_sharded_processes_agree_and_resume_what_one_process_left(
    tiny_fields: Fields, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    fields = tiny_fields(**{**OPTIONS, "sharding": "replicated"}, output=str(one))
    train(resolve(fields))
    shutil.copytree(one, two)
    newest, before = checkpoints(two)
    _flip_a_bit(newest)
    fields = {**fields, "sharding": "sharded", "output": str(two)}
    _, said = run_through([(fields, [])], tmp_path, processes=2)
    assert said.count(f"going on from {before.name}") == 1
    assert_same_run(one, two, tolerance=1e-6)


@pytest.mark.slow
def test_a_sharded_run_is_killed_at_every_moment(tiny_fields: Fields, tmp_path: Path) -> None:
    """A run of its own for each moment of an epoch's checkpoints, and one killed at some times."""
    fields = tiny_fields(**OPTIONS)
    kills = [*range(6, 21), *([number, "full"] for number in (6, 7, 9, 10, 13, 15, 18, 19))]
    names = [str(kill).strip("[]") for kill in kills]
    runs = [
        ({**fields, "output": str(tmp_path / name)}, [kill])
        for name, kill in zip(names, kills, strict=True)
    ]
    runs.append(({**fields, "output": str(tmp_path / "some times")}, ["0.0", "0.1", "0.3"]))
    runs.append(({**fields, "output": str(tmp_path / "whole")}, []))
    deaths, said = run_through(runs, tmp_path, processes=2)
    assert deaths[:-2] == [1] * len(kills)
    assert deaths[-2] >= 2
    assert "is damaged" not in said
    for name in (*names, "some times"):
        assert_same_run(tmp_path / "whole", tmp_path / name)


@pytest.mark.slow
def test_saving_needs_little_memory_beside_the_shard(tmp_path: Path) -> None:
    """100 million weights in two processes; see `sharded_memory.py` on how it is measured."""
    process = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"),
            *(str(Path(__file__).with_name("sharded_memory.py")), str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    measured = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(measured) == 2
    for of_process in measured:
        assert of_process["shard"] > 800e6  # weights, average and two moments, half of each
        for operation in ("weights", "checkpoint", "checking"):
            assert of_process[operation]["bytes"] <= 0.2 * of_process["shard"], operation
