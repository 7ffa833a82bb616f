"""Checkpoints of sharded runs: killed at any moment, damaged, resumed on other processes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from interrupted_runs import assert_same_run, run_through
from vision_ttt.engine import CheckpointError, train
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.engine.state import open_state
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
# Process 0's first moments are those of the descriptions (6), preceded by one where the attempt
# before left parts of a checkpoint. Of a checkpoint they are: the weights synced, renamed, their
# folder synced; at an epoch's end first the same of the best weights, and then the former
# checkpoint of this update renamed; the part synced; the manifest as the weights; the folder
# renamed, its folder synced; two for each checkpoint that is removed. Process 1 syncs its part.
KILLS = [
    [9, "half"],  # the first checkpoint's part
    15,  # just after it got its name
    22,  # at the epoch's end, when the former checkpoint of the same update was renamed
    20,  # while that one is removed
    [0, "full", 1],  # the other process's part
]


def test_a_sharded_run_is_killed_damaged_and_resumed_by_one_process(
    tiny_fields: Fields, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    fields = tiny_fields(**OPTIONS, keep_checkpoints=3, output=str(killed))
    runs = [({**fields, "output": str(whole)}, []), (fields, KILLS)]
    (_, deaths), said = run_through(runs, tmp_path, processes=2)
    assert deaths == len(KILLS)
    assert not list(killed.rglob("*.part"))
    assert "is damaged" not in said  # a part of a checkpoint never got a checkpoint's name
    assert_same_run(whole, killed)
    names = ["update-000000004", "update-000000003", "update-000000002"]
    assert sorted(os.listdir(killed / "checkpoints"), reverse=True) == names
    assert not list(killed.rglob(".*"))
    parts = ["manifest.json", "part-00000.safetensors", "part-00001.safetensors"]
    assert sorted(os.listdir(checkpoints(killed)[0])) == parts
    sizes = [path.stat().st_size for path in sorted(checkpoints(killed)[0].glob("part-*"))]
    assert max(sizes) < 1.5 * min(sizes)  # neither process writes the other's

    _assert_damages_are_named(killed, tmp_path)

    # One process goes on from the last checkpoint but one, as the last is damaged.
    part = checkpoints(killed)[0] / "part-00001.safetensors"
    _flip_a_bit(part)
    config = resolve({**fields, "sharding": "replicated"})
    train(config, resume=True)
    assert str(part) in caplog.text
    assert "going on from update-000000003" in caplog.text
    assert_same_run(whole, killed, tolerance=1e-6)
    names[0] += ".safetensors"
    assert [path.name for path in checkpoints(killed)] == names
    # Also from the second, and a folder with something else in it is kept.
    for path in checkpoints(killed)[:2]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(whole / "checkpoints" / "update-000000004", killed / "checkpoints" / names[0])
    (killed / "checkpoints" / names[0] / "somebody's").write_text("kept")
    (killed / "checkpoints" / names[0] / "manifest.json").unlink()
    train(config, resume=True)
    assert "going on from update-000000002" in caplog.text
    assert_same_run(whole, killed, tolerance=1e-6)
    aside = killed / "checkpoints" / f"{names[0]}.aside-1"
    assert (aside / "somebody's").read_text() == "kept"


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _assert_damages_are_named(run_dir: Path, tmp_path: Path) -> None:
    newest, before, _ = checkpoints(run_dir)
    open_state(newest)
    damages = [_flip_a_bit, _truncate, Path.unlink, _fifo, lambda path: path.write_bytes(b"")]
    for number, damage in enumerate(damages):
        for name in ("manifest.json", "part-00000.safetensors", "part-00001.safetensors"):
            copy = tmp_path / "damaged" / f"{number}-{name}"
            shutil.copytree(newest, copy)
            damage(copy / name)
            with pytest.raises(CheckpointError, match=str(copy)):
                open_state(copy)
    copy = tmp_path / "damaged" / "another checkpoint's part"
    shutil.copytree(newest, copy)
    shutil.copy(before / "part-00000.safetensors", copy)
    with pytest.raises(CheckpointError, match=r"part-00000.* is not the file"):
        open_state(copy)


@pytest.mark.slow
def test_sharded_processes_agree_and_resume_what_one_process_left(
    tiny_fields: Fields, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    fields = tiny_fields(**{**OPTIONS, "sharding": "replicated"}, output=str(one))
    train(resolve(fields))
    # Of two sharded processes the second finds the damage of its own share.
    shutil.copytree(one, two)
    shutil.rmtree(two / "checkpoints")
    (two / "checkpoints").mkdir()
    fields = {**fields, "sharding": "sharded", "output": str(two)}
    run_through([(fields, [])], tmp_path, processes=2)
    newest, before = checkpoints(two)
    _flip_a_bit(newest / "part-00001.safetensors")
    _, said = run_through([(fields, [])], tmp_path, processes=2)
    assert said.count(f"going on from {before.name}") == 1
    assert_same_run(one, two, tolerance=1e-6)
    # What one process left is a file, which each of the two reads its part of.
    shutil.rmtree(two / "checkpoints")
    shutil.copytree(one / "checkpoints", two / "checkpoints")
    checkpoints(two)[0].unlink()
    run_through([(fields, [])], tmp_path, processes=2)
    assert [path.is_dir() for path in checkpoints(two)] == [True, False]
    assert_same_run(one, two, tolerance=1e-6)


@pytest.mark.slow
def test_a_sharded_run_is_killed_at_every_moment(tiny_fields: Fields, tmp_path: Path) -> None:
    """A run of its own for each moment of an epoch's checkpoints, and one killed at some times."""
    fields = tiny_fields(**OPTIONS)
    kills = [
        *range(6, 41),
        *([number, "half", 1] for number in range(3)),
        *([number, "full"] for number in (6, 7, 9, 10, 13, 24, 30, 31, 35, 37, 38)),
    ]
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
