"""NaN, infinity and a full disk stop a run; the message names the place, the checkpoint stays."""

import errno
import functools
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import get_worker_info

import forked_python
from vision_ttt.acceleration.composite_vittt import CompositeTTTLinear
from vision_ttt.cli.main import main
from vision_ttt.data import LoaderError
from vision_ttt.data.sources import FolderImages
from vision_ttt.engine import ConfigError, NonFiniteError, TrainConfig, train
from vision_ttt.engine.logs import RunLog
from vision_ttt.engine.non_finite import replay
from vision_ttt.engine.non_finite_search import find_non_finite
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.engine.state import TrainState, read_state
from vision_ttt.engine.step import Outcome, Step
from vision_ttt.engine.stopping import stop_on_signals
from vision_ttt.recipes import change, resolve
from vision_ttt.tasks import load_model

Fields = Callable[..., dict]


def test_batch_norms_of_one_value_are_refused(tiny_fields: Fields) -> None:
    fields = tiny_fields(model="resnet18", arguments={}, drop_path=None, image_size=32)
    fields |= {"batch_size": 1, "epochs": None, "updates": 1, "warmup": 0}
    with pytest.raises(ConfigError, match=r"processes is 1; it must be at least 2.* of ResNet"):
        train(resolve(fields))
    train(resolve(fields | {"frozen_layers": "all"}))


class _Poison(torch.autograd.Function):
    """Identity whose output or gradient is NaN."""

    @staticmethod
    def forward(context, values: Tensor, forward: bool) -> Tensor:
        context.forward_only = forward
        return values * float("nan") if forward else values.clone()

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * float("nan"), None


class _Net(nn.Module):
    def __init__(self, at: str) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        self.last = nn.Linear(2, 2)
        self.at = at

    def forward(self, values: Tensor) -> Tensor:
        values = self.inner(self.first(values))
        if self.at == "gradient":
            values = _Poison.apply(values, False)
        return self.last(values)


def _where(model: nn.Module, images: Tensor) -> str:
    model(images).sum().backward()
    return find_non_finite(model, lambda: model(images), {"images": images})


def test_place_of_the_first_non_finite_number() -> None:
    images = torch.ones(1, 2)
    assert _where(_Net(""), images * float("inf")) == "the batch's images"
    model = _Net("")
    model.inner[0].register_forward_hook(lambda _m, _i, output: output * float("nan"))
    assert _where(model, images) == "the output of module 'inner.0'"
    # Backward reaches inner.0 first; `last`, above the poison, is finite.
    assert _where(_Net("gradient"), images) == "the gradient of parameter 'inner.0.bias'"
    model = _Net("")
    with torch.no_grad():
        model.last.weight[0, 0] = float("nan")
    assert _where(model, images) == "parameter 'last.weight'"
    assert "loss" in _where(_Net(""), images)


def _poison(monkeypatch: pytest.MonkeyPatch, kind: str, passes: Container[int]) -> None:
    """Make some training passes of a TTT layer NaN, counted from 0, and their repetitions."""
    original, numbers, poisoned = CompositeTTTLinear.forward, itertools.count(), []

    @functools.wraps(original)
    def forward(self: CompositeTTTLinear, *inputs: object, **more: object) -> Tensor:
        output = original(self, *inputs, **more)
        if self.training and torch.is_grad_enabled():
            poisoned[:] = [next(numbers) in passes]
        bad = self.training and poisoned[0]
        return _Poison.apply(output, kind == "output") if bad else output

    monkeypatch.setattr(CompositeTTTLinear, "forward", forward)


@pytest.mark.parametrize("kind", ["output", "gradient"])
def test_training_stops_at_the_step_and_keeps_the_checkpoint(
    tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    _poison(monkeypatch, kind, {5})  # the second update of the second epoch
    config = resolve(tiny_fields())
    with pytest.raises(NonFiniteError, match=r"last\.safetensors") as caught:
        train(config)
    assert (caught.value.update, caught.value.epoch) == (5, 1)
    assert "blocks.0.mixer.ttt" in caught.value.where
    model, metadata = load_model(Path(config.run.output) / "last.safetensors")
    assert metadata.update == 4
    assert all(torch.isfinite(weight).all() for weight in model.parameters())
    monkeypatch.undo()
    assert len(train(config, resume=True).metrics["history"]) == 2


def test_the_batch_is_saved_for_replay(
    tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve(tiny_fields(accumulation_steps=2))
    with monkeypatch.context() as patch:
        _poison(patch, "output", {11})  # the second half of update 5
        with pytest.raises(NonFiniteError, match=r"update 5 .*saved as .*non-finite"):
            train(config)
    (path,) = (Path(config.run.output) / "non-finite").iterdir()
    weights, passes, told = replay(path)
    assert (told["update"], told["epoch"], told["config"]["run"]["seed"]) == (5, 1, 0)
    assert "blocks.0.mixer.ttt" in told["where"]
    # The images are those that the training set has there, augmented for that epoch.
    ((images, targets, indices),) = (
        (each["images"], each["targets"], each["indices"]) for each in passes
    )
    task = config.task.open(config)
    task.prepare(load_model(_last(config))[0])
    train_set = task.train_set
    train_set.epoch = told["epoch"]
    for image, target, index in zip(images, targets, indices, strict=True):
        expected, label, _ = train_set[int(index)]
        assert torch.equal(image, expected)
        assert target == label
    # The weights are those the batch met: one update after the checkpoint.
    checkpointed = read_state(checkpoints(Path(config.run.output))[0])
    assert checkpointed.state.update == 4
    assert weights.keys() == checkpointed.model.keys()
    assert not torch.equal(weights["head.weight"], checkpointed.model["head.weight"])
    model, _ = load_model(_last(config))
    model.load_state_dict(weights)
    assert torch.isfinite(model(images)).all()  # without the poison


def test_updates_may_be_skipped_which_leaves_everything_as_it_was(
    tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = resolve(tiny_fields(non_finite="skip", ema_decay=0.9, checkpoint_every=1))
    with monkeypatch.context() as patch:
        _poison(patch, "gradient", {3, 5})
        result = train(change(config, {"keep_checkpoints": 8}))
    assert result.metrics["skipped_updates"] == [3, 5]
    assert "skipped update 5" in caplog.text
    saved = [read_state(path) for path in reversed(checkpoints(result.run_dir))]
    for update in range(1, 8):
        before, after = saved[update - 1], saved[update]
        same = torch.equal(before.model["head.weight"], after.model["head.weight"])
        assert same == (update in (3, 5))
        for part in ("model", "average", "moments"):
            one, other = getattr(before, part), getattr(after, part)
            assert all(torch.equal(one[name], other[name]) for name in one) == same
    assert all(row["train_loss"] < 10 for row in result.metrics["history"])


@pytest.mark.parametrize("mode", ["skip", "stop"])
def test_batch_norms_are_those_before_the_update(
    tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    batches = itertools.count()

    def poisoned(items: list, image_shape: Sequence[int]) -> dict:
        batch = original(items, image_shape)
        if next(batches) == 1:
            batch["images"][0, 0, 0, 0] = float("nan")
        return batch

    import vision_ttt.tasks.images.task as images

    original = images.collate
    monkeypatch.setattr(images, "collate", poisoned)
    fields = tiny_fields(model="test_resnet", arguments={}, drop_path=None, image_size=32)
    fields |= {"epochs": 1, "checkpoint_every": 1, "keep_checkpoints": 8, "non_finite": mode}
    run_dir = Path(fields["output"])
    if mode == "skip":
        train(resolve(fields))
        first, second, *_ = [read_state(path).model for path in reversed(checkpoints(run_dir))]
        assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    else:
        with pytest.raises(NonFiniteError):
            train(resolve(fields))
        first = read_state(checkpoints(run_dir)[0]).model
    (path,) = (run_dir / "non-finite").iterdir()
    weights, _, told = replay(path)
    assert "running_mean" in " ".join(first)
    assert all(torch.equal(weight, weights[name]) for name, weight in first.items())
    assert "running" not in told["where"]


@pytest.mark.parametrize(("batch_size", "last"), [(4, 5), (1, 11)])
def test_skipping_ends_after_ten_in_a_row_or_an_epochs_updates(
    tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch, batch_size: int, last: int
) -> None:
    _poison(monkeypatch, "output", range(2, 100))
    config = resolve(tiny_fields(non_finite="skip", epochs=10, batch_size=batch_size))
    with pytest.raises(NonFiniteError, match=f"update {last} "):
        train(config)


def _last(config: TrainConfig) -> Path:
    return Path(config.run.output) / "last.safetensors"


def test_nan_before_any_checkpoint(tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch) -> None:
    import vision_ttt.tasks.images.task as images

    def poisoned(items: list, image_shape: Sequence[int]) -> dict:
        batch = original(items, image_shape)
        batch["images"][0, 0, 0, 0] = float("nan")
        return batch

    original = images.collate
    monkeypatch.setattr(images, "collate", poisoned)
    config = resolve(tiny_fields())
    with pytest.raises(NonFiniteError, match=r"update 0 .*the batch's images.*no checkpoint yet"):
        train(config)
    assert not (Path(config.run.output) / "last.safetensors").exists()


def test_full_disk_keeps_the_last_checkpoint(
    tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve(tiny_fields())
    original = os.fsync

    def full(descriptor: int) -> None:
        if (Path(config.run.output) / "metrics.json").exists():  # the last file of the first epoch
            raise OSError(errno.ENOSPC, "No space left on device")
        original(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left.*former content is kept.*last\.safetensors"):
        train(config)
    monkeypatch.undo()
    run = Path(config.run.output)
    assert load_model(run / "last.safetensors")[1].update == 4
    assert not [path for path in run.rglob("*") if path.name.endswith(".part")]
    assert len(train(config, resume=True).metrics["history"]) == 2


_UNDER_A_LIMIT = """
import resource, signal, sys
from vision_ttt.cli.main import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then writing fails, as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(main(["train", sys.argv[2], "--resume"]))
"""


def test_the_system_refuses_to_write_on(tiny_fields: Fields, tmp_path: Path) -> None:
    """Half of a checkpoint is written when the system says no; the one before is whole."""
    whole = train(resolve(tiny_fields(output=str(tmp_path / "whole"), epochs=3)))
    config = resolve(tiny_fields(epochs=3))
    with pytest.MonkeyPatch.context() as patch:
        _poison(patch, "output", {6})
        with pytest.raises(NonFiniteError):
            train(config)
    (checkpoint,) = checkpoints(Path(config.run.output))
    limit = str(checkpoint.stat().st_size // 2)
    recipe = str(Path(config.run.output) / "config.yaml")
    process = forked_python.run(["-c", _UNDER_A_LIMIT, limit, recipe], timeout=120)
    assert process.returncode == 2, process.stderr
    assert "File too large (nothing was written)" in process.stderr
    assert "checkpoints/update-000000008" in process.stderr
    assert "Traceback" not in process.stderr
    assert checkpoints(Path(config.run.output)) == [checkpoint]
    assert not list(Path(config.run.output).rglob("*.part"))
    resumed = train(config, resume=True)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name])


def _write(recipe: Path, fields: dict) -> None:
    recipe.write_text(json.dumps(resolve(fields).as_dict()))


def test_a_folder_that_cannot_be_written(
    tiny_fields: Fields, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    recipe = tmp_path / "recipe.yaml"
    for place in (tmp_path / "file" / "run", Path("/proc/run")):
        _write(recipe, tiny_fields(output=str(place)))
        assert main(["train", str(recipe)]) == 2
        (told,) = capsys.readouterr().err.splitlines()
        assert str(place) in told


@pytest.fixture
def forked_workers() -> Iterator[None]:
    """Give worker processes what a test replaces, where Python does not fork by default, too."""
    method = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(method, force=True)


@pytest.mark.usefixtures("forked_workers")
def test_a_hanging_worker_times_out(
    tiny_fields: Fields,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hanging(self: FolderImages, index: int) -> None:
        if get_worker_info() is None:
            return original(self, index)
        return time.sleep(1000)

    original = FolderImages.__getitem__
    monkeypatch.setattr(FolderImages, "__getitem__", hanging)
    # PyTorch waits so long for each worker to end by itself.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    recipe = tmp_path / "recipe.yaml"
    _write(recipe, tiny_fields(num_workers=1, loader_timeout=1.5))
    assert main(["train", str(recipe)]) == 4
    assert "no worker process delivered a batch within 1.5 s" in capsys.readouterr().err
    for worker in multiprocessing.active_children():  # told to end, but not waited for
        worker.join(10)
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_dies_is_told(tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(self: FolderImages, index: int) -> None:
        if get_worker_info() is None:
            return original(self, index)
        return os.kill(os.getpid(), signal.SIGKILL)

    original = FolderImages.__getitem__
    monkeypatch.setattr(FolderImages, "__getitem__", killed)
    with pytest.raises(LoaderError, match="worker process died"):
        train(resolve(tiny_fields(num_workers=1)))


def test_a_worker_that_dies_during_an_update_is_told(
    tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch raises an error wherever the main process is when the signal arrives."""
    original, before = Step.__call__, multiprocessing.active_children()

    def killing(self: Step, *inputs: object) -> Outcome:
        for worker in multiprocessing.active_children():
            if worker not in before:
                os.kill(worker.pid, signal.SIGKILL)
                time.sleep(10)  # the signal ends it
        return original(self, *inputs)

    monkeypatch.setattr(Step, "__call__", killing)
    with pytest.raises(LoaderError, match="worker process died"):
        train(resolve(tiny_fields(num_workers=1)))


def test_second_interrupt_is_immediate() -> None:
    # Started in the background of a shell, Python ignores interrupts.
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with stop_on_signals() as request:
            signal.raise_signal(signal.SIGINT)
            assert request.signal == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, outside)


def test_full_disk_under_tensorboard_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    state = TrainState(update=1, units=1, span_seconds=1.0)
    outcome = Outcome(loss_sum=1.0, units=1, gradient_norm=1.0, stop_votes=0.0, passes=())
    config, task = resolve({"task": "classification"}), SimpleNamespace(unit="images")
    with RunLog(tmp_path, config, torch.device("cpu"), state, task, 1, False) as log:
        monkeypatch.setattr(log.events, "add_scalar", full)
        with pytest.raises(OSError, match=r"No space left.*tensorboard"):
            log.update(state, outcome, 1e-3)


def test_a_run_folder_that_vanishes_is_named_without_a_traceback_from_a_thread(
    tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve(tiny_fields())
    from_threads: list[object] = []
    monkeypatch.setattr(threading, "excepthook", from_threads.append)
    original, updates = Step.__call__, itertools.count(1)

    def vanishing(self: Step, *inputs: object) -> Outcome:
        if next(updates) == 3:
            shutil.rmtree(config.run.output)
        return original(self, *inputs)

    monkeypatch.setattr(Step, "__call__", vanishing)
    with pytest.raises(OSError, match=r"the folder is gone.*/run/"):
        train(config)
    assert not from_threads
    assert not Path(config.run.output).exists()
