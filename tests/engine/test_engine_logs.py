"""What a run shows and writes while it trains."""

import errno
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vision_ttt.engine import ConfigError, train
from vision_ttt.engine.events import EventFile
from vision_ttt.engine.logs import RunLog
from vision_ttt.engine.metrics import inner_loss_reduction, timed
from vision_ttt.engine.state import TrainState
from vision_ttt.engine.step import Outcome
from vision_ttt.recipes import resolve

Fields = Callable[..., dict]


def test_the_bar_tells_speed_loss_inner_loss_rate_memory_and_time_left(tmp_path: Path) -> None:
    state = TrainState(update=3, position=3, units=128, span_seconds=2.0)
    outcome = Outcome(loss_sum=8.0, units=4, gradient_norm=1.0, stop_votes=0.0, passes=())
    screen = Console(file=io.StringIO(), width=200)
    config, task = resolve({"task": "classification"}), SimpleNamespace(unit="images")
    with RunLog(tmp_path, config, torch.device("cpu"), state, task, 10, False) as log:
        log.reduction = 0.25
        log.update(state, outcome, 5e-4)
        assert (log.bar.tasks[0].completed, log.bar.tasks[0].total) == (3, 10)
        screen.print(log.bar.get_renderable())
    said = screen.file.getvalue()
    for figure in ("64 images/s", "loss 2.000", "inner loss -25%", "lr 5.0e-04", "GiB", "ETA"):
        assert figure in said
    assert "epoch 1/300" in said


def test_the_bar_of_a_run_of_updates_counts_them(tmp_path: Path) -> None:
    state = TrainState(update=3, position=3, units=128, span_seconds=2.0)
    outcome = Outcome(loss_sum=8.0, units=4, gradient_norm=1.0, stop_votes=0.0, passes=())
    config, task = resolve({"task": "classification", "updates": 10}), SimpleNamespace(unit="boxes")
    with RunLog(tmp_path, config, torch.device("cpu"), state, task, 10, False) as log:
        log.update(state, outcome, 5e-4)
        (bar,) = log.bar.tasks
    assert bar.description == "update 3/10"
    assert bar.fields["figures"].startswith("64 boxes/s")


def test_tensorboard_has_every_update_and_epoch(tiny_fields: Fields) -> None:
    result = train(resolve(tiny_fields()))
    events = EventAccumulator(str(result.run_dir / "tensorboard"))
    events.Reload()
    updates = [event.step for event in events.Scalars("train/loss")]
    assert updates == list(range(1, 9))
    rows = result.metrics["history"]
    accuracies = [event.value for event in events.Scalars("evaluation/test_accuracy")]
    assert accuracies == pytest.approx([row["test_accuracy"] for row in rows])
    assert {"train/learning_rate", "speed/memory_bytes", "inner_loss/blocks.0.mixer.ttt"} <= set(
        events.Tags()["scalars"]
    )
    for row in rows:
        assert row["memory_bytes"] > 2**20
        assert 0 < row["data_share"] < 1


def test_what_a_run_could_not_write_at_its_end_it_writes_when_resumed(
    tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve(tiny_fields())
    write, failing = RunLog.metrics, [False, True]

    def full(log: RunLog, *given: Any) -> None:
        if failing.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(log, *given)

    monkeypatch.setattr(RunLog, "metrics", full)
    with pytest.raises(OSError, match="No space left"):
        train(config)
    folder = Path(config.run.output)
    assert len(json.loads((folder / "metrics.json").read_text())["history"]) == 1
    monkeypatch.undo()
    result = train(config, resume="auto")
    told = json.loads((folder / "metrics.json").read_text())
    assert told["history"] == result.metrics["history"]
    assert len((folder / "metrics.csv").read_text().splitlines()) == 3
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("evaluation/test_accuracy")] == [4, 8]


def test_points_of_a_run_that_went_on_replace_the_ones_after_its_checkpoint(tmp_path: Path) -> None:
    for start, values in ((0, range(1, 6)), (3, range(13, 15))):
        file = EventFile(tmp_path, purge_step=start)
        for step, value in enumerate(values, start=start):
            file.add_scalar("loss", value, step)
        file.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("loss")]
    assert points == [(0, 1), (1, 2), (2, 3), (3, 13), (4, 14)]


def test_weights_and_biases_gets_what_tensorboard_gets(
    tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch
) -> None:
    points: list[tuple[int, dict]] = []
    ended: list[int] = []
    begun: list[dict] = []

    def init(**settings: object) -> SimpleNamespace:
        begun.append(settings)
        return SimpleNamespace(
            log=lambda values, step: points.append((step, values)),
            finish=lambda exit_code: ended.append(exit_code),
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    config = resolve(tiny_fields(wandb_project="vittt", epochs=1))
    run_dir = train(config).run_dir
    assert begun[0]["project"] == "vittt"
    assert begun[0]["config"]["optimisation"]["epochs"] == 1
    assert [step for step, values in points if "train/loss" in values] == [1, 2, 3, 4]
    assert [step for step, values in points if "evaluation/test_accuracy" in values] == [4]
    assert ended == [0]
    task = config.task.open(config)
    for state in (TrainState(update=4), TrainState()):  # resumed, and begun anew
        with RunLog(run_dir, config, torch.device("cpu"), state, task, 4, False):
            pass
    first, again, other = (settings["id"] for settings in begun)
    assert first == again != other


def test_weights_and_biases_that_is_not_installed(
    tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it then fails
    with pytest.raises(ConfigError, match="wandb is not installed"):
        train(resolve(tiny_fields(wandb_project="vittt")))


def test_inner_loss_reduction() -> None:
    losses = {"a": torch.tensor([2.0, 5.0, 1.0]), "b": torch.tensor([2.0, 0.0, 2.0])}
    assert inner_loss_reduction(losses) == pytest.approx(0.25)
    assert inner_loss_reduction({}) is None
    assert inner_loss_reduction({"one mini-batch": torch.tensor([4.0])}) is None


def test_waiting_for_images_is_timed() -> None:
    import time

    def slow() -> object:
        for number in range(3):
            time.sleep(0.02)
            yield number

    state = TrainState()
    started = time.perf_counter()
    items = []
    for item in timed(slow(), state):
        time.sleep(0.03)
        items.append(item)
    assert items == [0, 1, 2]
    assert 0.06 <= state.data_seconds <= time.perf_counter() - started - 0.09
