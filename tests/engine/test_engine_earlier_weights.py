"""A run's checkpoints to resume from are its earlier weights, too."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vision_ttt.engine import CheckpointError, train
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.recipes import resolve
from vision_ttt.tasks import load_model


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
def test_checkpoints_hold_what_was_evaluated_at_them(
    tiny_fields: Callable[..., dict], ema_decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(resolve(tiny_fields(ema_decay=ema_decay))).run_dir
    former, last = (load_model(path) for path in reversed(checkpoints(run)))
    monkeypatch.chdir(run / "checkpoints")
    assert load_model(checkpoints(run)[0].name)[1] == last[1]
    wanted, described = load_model(run / "last.safetensors")
    weights = last[0].state_dict()
    assert all(torch.equal(weights[name], x) for name, x in wanted.state_dict().items())
    assert last[1] == described
    assert (former[1].epoch, former[1].update) == (1, 4)
    assert (last[1].epoch, last[1].update) == (2, 8)
    assert set(former[1].metrics) == set(described.metrics)
    assert former[1].metrics != described.metrics
    assert not torch.equal(former[0].state_dict()["head.weight"], weights["head.weight"])
    same = dataclasses.replace(described, epoch=0, update=0, metrics={})
    assert dataclasses.replace(former[1], epoch=0, update=0, metrics={}) == same


def test_without_the_runs_own_description_they_are_refused(
    tiny_fields: Callable[..., dict], tmp_path: Path
) -> None:
    run = train(resolve(tiny_fields(epochs=1))).run_dir
    other = tmp_path / "other"
    train(resolve(tiny_fields(epochs=1, label_smoothing=0.2, output=str(other))))
    (state,) = checkpoints(run)
    shutil.copy(other / "last.safetensors", run / "last.safetensors")
    with pytest.raises(CheckpointError, match=r"update-000000004.* is of another run than .*last"):
        load_model(state)
    (run / "last.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="last"):
        load_model(state)
