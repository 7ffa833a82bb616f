"""Runs that are killed, and the comparison of what two runs left."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import forked_python
from vision_ttt.engine import TrainConfig, train
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.engine.state import SavedRun, read_state
from vision_ttt.engine.step import Step
from vision_ttt.recipes import resolve
from vision_ttt.tasks import load_model

_TIMES = {"seconds", "images_per_second", "data_share", "memory_bytes"}
_DRIVER = Path(__file__).with_name("engine") / "killed_run.py"


def run_through(
    runs: list[tuple[dict, list]], tmp_path: Path, *, processes: int = 1
) -> tuple[list[int], str]:
    """Train each run's fields through its kills, see `killed_run.py`, in processes of their own.

    Returns:
        How many kills of each run came true, and what the runs wrote to stderr.
    """
    arguments = []
    for number, (fields, kills) in enumerate(runs):
        recipe = tmp_path / f"recipe-{number}.yaml"
        recipe.write_text(json.dumps(resolve(fields).as_dict()))
        arguments += [str(recipe), json.dumps(kills)]
    process = forked_python.run([str(_DRIVER), str(processes), *arguments], timeout=1700)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout), process.stderr


def train_until(config: TrainConfig, updates: int) -> None:
    """Train for so many updates; the run ends before the next one, as if it was killed there."""
    step, made = Step.__call__, []

    def killed(self: Step, *arguments: object) -> object:
        if len(made) == updates:
            raise KeyboardInterrupt
        made.append(True)
        return step(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "__call__", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config)


def assert_same_run(first: Path, second: Path, *, tolerance: float = 0.0) -> None:
    """Assert that two run directories hold the same run, bit for bit unless there is a tolerance.

    With a tolerance the checkpoints' tensors are compared, but for the moments.
    """
    one, other = (read_state(checkpoints(run)[0]) for run in (first, second))
    assert one.state.update == other.state.update
    if tolerance:
        for part in ("model", "average"):
            tensors, others = getattr(one, part), getattr(other, part)
            assert tensors.keys() == others.keys()
            assert max((others[k] - t).abs().max() for k, t in tensors.items()) <= tolerance, part
        assert one.moments.keys() == other.moments.keys()
        return
    assert _untimed(one) == _untimed(other)
    for part in ("model", "average", "moments"):
        tensors, others = getattr(one, part), getattr(other, part)
        assert tensors.keys() == others.keys()
        assert tensors, part
        assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items()), part
    for name in ("last.safetensors", "best.safetensors"):
        models = (load_model(run / name, task=None)[0] for run in (first, second))
        weights, others = (model.state_dict() for model in models)
        assert all(torch.equal(weight, others[key]) for key, weight in weights.items()), name


def _untimed(saved: SavedRun) -> dict:
    state = asdict(saved.state)
    rows = [{k: v for k, v in row.items() if k not in _TIMES} for row in state["history"]]
    for name in ("seconds", "span_seconds", "data_seconds", "config"):
        del state[name]
    return {**state, "history": rows}
