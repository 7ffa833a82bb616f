"""The loop: what it leaves, that it repeats itself, and that a resumed run is the same run."""

import csv
import dataclasses
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from timm.data.dataset import IterableImageDataset
from torch import nn
from torch.utils.data import DataLoader

import forked_python
from vision_ttt import recipes
from vision_ttt.data import ImageError
from vision_ttt.data.loading import Batch
from vision_ttt.engine import ConfigError, Preempted, TrainResult, evaluation, train
from vision_ttt.engine.assembly import moving_average
from vision_ttt.engine.optimisation import Length, make_optimizer, make_scheduler
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.engine.state import read_state
from vision_ttt.errors import Interrupted, UserError
from vision_ttt.recipes import change, resolve
from vision_ttt.tasks import load_model

Fields = Callable[..., dict]
TIMES = ("seconds", "images_per_second", "data_share", "memory_bytes")


def _same_weights(first: nn.Module, second: nn.Module) -> bool:
    others = second.state_dict()
    return all(torch.equal(weight, others[name]) for name, weight in first.state_dict().items())


def _untimed(metrics: dict) -> dict:
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in metrics["history"]]
    return {**{k: v for k, v in metrics.items() if k not in TIMES}, "history": rows}


def _interrupt_at(monkeypatch: pytest.MonkeyPatch, update: int) -> None:
    """Press Ctrl-C in the course of an update, counted from 0."""
    from timm.scheduler.scheduler import Scheduler

    original, pressed = Scheduler.step_update, []

    def step_update(self: Scheduler, num_updates: int, metric: float | None = None) -> None:
        if num_updates == update and not pressed:
            pressed.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        original(self, num_updates, metric)

    monkeypatch.setattr(Scheduler, "step_update", step_update)


def test_run_directory(tiny_fields: Fields) -> None:
    config = resolve(tiny_fields())
    result = train(config)
    run = result.run_dir
    assert {path.name for path in run.iterdir()} == {
        "config.yaml",
        "environment.json",
        "metrics.csv",
        "metrics.json",
        "tensorboard",
        "last.safetensors",
        "best.safetensors",
        "checkpoints",
    }
    assert recipes.load(str(run / "config.yaml")) == config
    assert "torch" in json.loads((run / "environment.json").read_text())["versions"]
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics == result.metrics
    assert [row["epoch"] for row in metrics["history"]] == [1, 2]
    assert len(metrics["history"][0]["inner_losses"]["blocks.0.mixer.ttt"]) == 4
    assert metrics["test_accuracy"] == result.evaluation.accuracy
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["test_loss"]) for row in rows] == [
        row["test_loss"] for row in metrics["history"]
    ]
    model, metadata = load_model(run / "last.safetensors")
    assert _same_weights(model, result.model)
    assert metadata.carried["classes"] == ["dark", "light"]
    assert (metadata.epoch, metadata.update) == (2, 8)


def test_it_learns(tiny_fields: Fields) -> None:
    result = train(resolve(tiny_fields(epochs=8, horizontal_flip=0.0, crop_scale=0.5)))
    assert result.evaluation.accuracy == 1.0
    assert result.evaluation.confusion.tolist() == [[4, 0], [0, 4]]
    assert result.metrics["history"][-1]["train_loss"] < result.metrics["history"][0]["train_loss"]


EVERYTHING = {
    "mixup": 0.8,
    "cutmix": 1.0,
    "ema_decay": 0.9,
    "auto_augment": "rand-m9-mstd0.5-inc1",
    "random_erasing": 0.25,
    "accumulation_steps": 2,
    "batch_size": 4,
    "layer_decay": 0.7,
    "gradient_checkpointing": True,
}
BOTH = pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), EVERYTHING],
    ids=["plain", "everything"],
)


def _run(tiny_fields: Fields, **overrides: object) -> TrainResult:
    return train(resolve(tiny_fields(**overrides)))


@pytest.mark.parametrize("keeps", [True, False])
def test_freed_memory_is_kept_unless_switched_off(
    tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    called: list[bool] = []
    module = sys.modules["vision_ttt.engine.train"]
    monkeypatch.setattr(module, "keep_freed_memory", lambda: called.append(True))
    _run(tiny_fields, epochs=1, keep_freed_memory=keeps)
    assert bool(called) is (keeps and not torch.accelerator.is_available())


@BOTH
def test_same_seed_same_run(tiny_fields: Fields, tmp_path: Path, options: dict) -> None:
    first = _run(tiny_fields, **options, output=str(tmp_path / "1"))
    second = _run(tiny_fields, **options, output=str(tmp_path / "2"), num_workers=1)
    other = _run(tiny_fields, **options, output=str(tmp_path / "3"), seed=1)
    assert _untimed(first.metrics) == _untimed(second.metrics)
    assert _same_weights(first.model, second.model)
    assert not _same_weights(first.model, other.model)


def test_worker_processes_live_as_long_as_the_run(
    tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    original = multiprocessing.process.BaseProcess.start

    def start(self: multiprocessing.process.BaseProcess) -> None:
        started.append(self)
        original(self)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
    _run(tiny_fields, epochs=3, num_workers=1)
    assert len(started) == 2  # for training and for evaluation
    assert not any(process.is_alive() for process in started)


@BOTH
@pytest.mark.parametrize("update", [1, 3, 4], ids=["mid-epoch", "epoch's last", "epoch's first"])
def test_interrupted_and_resumed_is_the_same_run(
    tiny_fields: Fields,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict,
    update: int,
) -> None:
    whole = _run(tiny_fields, **options, output=str(tmp_path / "whole"))
    config = resolve(tiny_fields(**options, output=str(tmp_path / "parts")))
    with monkeypatch.context() as patch:
        _interrupt_at(patch, update)
        with pytest.raises(Interrupted, match=rf"update {update + 1} .*config\.yaml --resume"):
            train(config)
    _, metadata = load_model(tmp_path / "parts" / "last.safetensors")
    assert metadata.update == update + 1
    resumed = train(config, resume=True)
    assert _same_weights(whole.model, resumed.model)
    assert _untimed(whole.metrics) == _untimed(resumed.metrics)
    assert torch.equal(whole.evaluation.probabilities, resumed.evaluation.probabilities)


def test_resuming_from_an_epochs_end(tiny_fields: Fields, tmp_path: Path) -> None:
    whole = _run(tiny_fields, output=str(tmp_path / "whole"))
    config = resolve(tiny_fields(output=str(tmp_path / "parts")))

    class Killed(Exception):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        # Just after the checkpoint. (The module hides behind its function of the same name.)
        patch.setattr(sys.modules["vision_ttt.engine.train"], "row_line", killed)
        with pytest.raises(Killed):
            train(config)
    resumed = train(config, resume=True)
    assert _same_weights(whole.model, resumed.model)
    assert _untimed(whole.metrics) == _untimed(resumed.metrics)
    # A finished run resumes to itself.
    again = train(config, resume=True)
    assert again.metrics == resumed.metrics
    assert again.evaluation.accuracy == whole.evaluation.accuracy


@pytest.mark.parametrize(
    ("asked", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 0)],
)
def test_a_request_to_stop_from_outside_leaves_a_checkpoint(
    tiny_fields: Fields, tmp_path: Path, asked: signal.Signals, code: int
) -> None:
    fields = tiny_fields(epochs=10_000, num_workers=1)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(resolve(fields).as_dict()))
    run = Path(fields["output"])
    with open(tmp_path / "said", "w+") as file:
        arguments = ["-m", "vision_ttt", "train", str(recipe)]
        process = forked_python.start(arguments, stdout=file, stderr=file, start_new_session=True)
        try:
            while "epoch 1/" not in (tmp_path / "said").read_text():
                assert process.poll() is None, (tmp_path / "said").read_text()
                time.sleep(0.01)
            os.killpg(process.pid, asked)  # as terminals and schedulers do: to workers, too
            process.wait(30)  # the grace time that schedulers give
        finally:
            process.kill()
    said = (tmp_path / "said").read_text()
    assert process.returncode == code, said
    assert "--resume" in said
    assert "Traceback" not in said
    _, metadata = load_model(run / "last.safetensors")
    assert read_state(checkpoints(run)[0]).state.update == metadata.update


def test_preempted_in_the_course_of_an_evaluation(
    tiny_fields: Fields, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _run(tiny_fields, output=str(tmp_path / "whole"))
    config = resolve(tiny_fields(output=str(tmp_path / "parts")))
    original = evaluation.watched

    def terminated(loader: DataLoader) -> Iterator[Batch]:
        for batch in original(loader):
            os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "watched", terminated)
        with pytest.raises(Preempted, match="update 4 "):
            train(config)
    resumed = train(config, resume=True)
    assert _same_weights(whole.model, resumed.model)
    assert _untimed(whole.metrics) == _untimed(resumed.metrics)


def test_a_run_is_not_overwritten_by_accident(tiny_fields: Fields) -> None:
    config = resolve(tiny_fields(epochs=1))
    first = train(config)
    with pytest.raises(ConfigError, match="already holds a run"):
        train(config)
    with pytest.raises(ConfigError, match="exclude"):
        train(config, resume=True, overwrite=True)
    changed = change(config, {"learning_rate": 2e-3})
    with pytest.raises(ConfigError, match=r"learning_rate 0.001 -> 0.002"):
        train(changed, resume=True)
    second = train(changed, overwrite=True)
    assert not _same_weights(first.model, second.model)
    assert len(list((second.run_dir / "tensorboard").iterdir())) == 1


def test_nothing_to_resume(tiny_fields: Fields) -> None:
    config = resolve(tiny_fields())
    with pytest.raises(FileNotFoundError, match="Nothing to resume"):
        train(config, resume=True)
    assert not Path(config.run.output).exists()


def test_what_does_not_fit_leaves_no_run_directory(tiny_fields: Fields) -> None:
    for overrides, told in (
        ({"batch_size": 64}, "batch_size is 64, but the training data have 16 items"),
        ({"model": "vittt_nano"}, "nearest: vittt_nano_patch4_32"),
        ({"arguments": {"dept": 1}}, "dept"),
        ({"auto_augment": "nonsense"}, "auto_augment is 'nonsense': unknown policy"),
        ({"auto_augment": "rand-m9-msdt0.5"}, "'msdt0.5' is no section of rand; accepted: such as"),
        ({"num_classes": 3}, "num_classes is 3, but .* has 2 classes"),
        ({"frozen_layers": 99}, "frozen_layers is 99, .* from 0 to 2, or all"),
        ({"objective": "flow"}, "unknown key 'objective': task.objective is of task diffusion"),
        ({"noise_steps": 10}, "'noise_steps': task.noise_steps is of task diffusion, .* classif"),
        (
            {"model": "dit3_nano_patch4_32", "arguments": {"depth": 1}, "drop_path": None},
            "dit3_nano_patch4_32 denoises .* set task to diffusion",
        ),
        ({"image_size": 7}, "images of 7 × 7 are not whole patches of 4 × 4"),
        ({"arguments": {"depth": 0}}, "depth is 0; accepted: 1 to 1,000"),
        ({"arguments": {"patch_size": 0}}, "patch_size is 0; accepted"),
        (
            {"model": "vit3_tiny_patch16_224", "arguments": {"depth": 1}, "image_size": 7},
            r"ViT3 cannot take images of 7 × 7 pixels \(image_size\): .* not whole patches",
        ),
        (
            {"model": "resnet10t", "arguments": {"layers": "x"}, "drop_path": None},
            "cannot be built",
        ),
        ({"train_split": "training"}, "train_split is 'training', but the folder .* no use for it"),
        ({"test_fraction": 0.5}, "test_fraction is 0.5, but .* which has val/, has no use for it"),
        ({"dataset_root": "x"}, "dataset_root is 'x', but the folder"),
    ):
        fields = tiny_fields(**overrides)
        with pytest.raises(ValueError, match=told) as caught:
            train(resolve(fields))
        assert isinstance(caught.value, UserError)
        assert not Path(fields["output"]).exists()


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_damaged_items_stop_or_are_counted(
    tiny_fields: Fields, image_folder: Path, num_workers: int
) -> None:
    bad = [image_folder / "train" / "dark" / "3.png", image_folder / "val" / "light" / "0.png"]
    for path in bad:
        path.write_bytes(path.read_bytes()[:50])
    fields = tiny_fields(epochs=1, num_workers=num_workers, mixup=0.5)
    with pytest.raises(ImageError, match=r"dark/3\.png"):
        train(resolve(fields))
    result = train(resolve({**fields, "skip_bad": True}), overwrite=True)
    assert sorted(result.metrics["damaged_items"]) == [str(path) for path in bad]
    assert len(result.evaluation.targets) == 7


def test_accumulation_sums_to_the_same_step(tiny_fields: Fields, tmp_path: Path) -> None:
    common = {"epochs": 1, "drop_path": 0.0, "warmup": 0, "clip_norm": 0.0}
    once = _run(tiny_fields, **common, output=str(tmp_path / "1"))
    twice = _run(tiny_fields, **common, output=str(tmp_path / "2"), accumulation_steps=2)
    for name, weight in once.model.state_dict().items():
        torch.testing.assert_close(twice.model.state_dict()[name], weight, rtol=0, atol=2e-5)


def test_bfloat16_stays_close(tiny_fields: Fields, tmp_path: Path) -> None:
    full = _run(tiny_fields, epochs=1, output=str(tmp_path / "1"))
    half = _run(tiny_fields, epochs=1, output=str(tmp_path / "2"), precision="bfloat16")
    assert next(half.model.parameters()).dtype == torch.float32
    losses = [r.metrics["history"][0]["train_loss"] for r in (full, half)]
    assert losses[0] != losses[1]
    assert math.isclose(*losses, rel_tol=0.02)


def test_starting_from_weights(tiny_fields: Fields, tmp_path: Path) -> None:
    source = _run(tiny_fields, epochs=1, output=str(tmp_path / "source"))
    fields = tiny_fields(
        epochs=1,
        output=str(tmp_path / "fine"),
        initial_weights=str(tmp_path / "source" / "last.safetensors"),
        learning_rate=1e-12,
        warmup_learning_rate=0.0,
        minimum_learning_rate=0.0,
    )
    tuned = train(resolve(fields))
    for name, weight in source.model.state_dict().items():
        torch.testing.assert_close(tuned.model.state_dict()[name], weight, rtol=0, atol=1e-9)


def test_a_model_of_timms_trains_too(tiny_fields: Fields) -> None:
    result = _run(tiny_fields, model="resnet18", arguments={}, image_size=32, epochs=1)
    assert result.metrics["history"][0]["inner_losses"] == {}
    assert result.metrics["history"][0]["inner_loss"] is None
    load_model(result.run_dir / "last.safetensors")


def test_decay_groups_and_layer_decay() -> None:
    model = timm.create_model("vittt_nano_patch4_32", num_classes=2, depth=2)
    config = resolve({"task": "classification", "weight_decay": 0.05, "learning_rate": 1e-3})
    names = {id(weight): name for name, weight in model.named_parameters()}
    groups = make_optimizer(model, config.optimisation).param_groups
    decayed = {names[id(p)] for g in groups if g["weight_decay"] > 0 for p in g["params"]}
    free = set(names.values()) - decayed
    assert "patch_embed.proj.weight" in decayed
    assert "head.weight" in decayed
    assert set(model.no_weight_decay()) & set(names.values()) <= free
    assert any(model.get_parameter(name).ndim > 1 for name in free)
    assert all(model.get_parameter(name).ndim > 1 for name in decayed)

    optimisation = change(config, {"layer_decay": 0.5}).optimisation
    layered = make_optimizer(model, optimisation).param_groups
    make_scheduler(torch.optim.AdamW(layered), optimisation, Length.of(optimisation, 10, 1))
    scale = {names[id(p)]: g["lr_scale"] for g in layered for p in g["params"]}
    assert scale["head.weight"] == 1.0
    assert scale["patch_embed.proj.weight"] < scale["blocks.0.mixer.ttt.in_proj.weight"] < 1.0


def test_units_that_fill_whole_updates_make_no_further_one() -> None:
    for batch_size, units in ((75, 525), (77, 539), (91, 273), (91, 9_100), (75, 75_000)):
        fields = {"batch_size": batch_size, "units": units, "warmup": batch_size}
        optimisation = resolve({"task": "classification", **fields}).optimisation
        length = Length.of(optimisation, updates_per_epoch=10, units_per_item=1)
        assert (length.updates, length.warmup) == (units // batch_size, 1.0)
        more = dataclasses.replace(optimisation, units=units + 1)
        assert Length.of(more, 10, 1).updates == units // batch_size + 1
        assert Length.of(more, 10, 7).updates == -(-(units + 1) // (7 * batch_size))


def _rates(**fields: object) -> list[float]:
    """The learning rates of 100 updates, 10 an epoch."""
    values = {"learning_rate": 1.0, "warmup_learning_rate": 0.0, "minimum_learning_rate": 0.1}
    config = resolve({"task": "classification", "epochs": 10, "warmup": 2, **values, **fields})
    optimizer = torch.optim.AdamW(
        [nn.Parameter(torch.zeros(1))], lr=config.optimisation.learning_rate
    )
    length = Length.of(config.optimisation, updates_per_epoch=10, units_per_item=1)
    scheduler = make_scheduler(optimizer, config.optimisation, length)
    rates = []
    for update in range(100):
        scheduler.step_update(update)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_schedule_warms_up_and_follows_the_cosine() -> None:
    rates = _rates()
    assert rates[0] == 0.0
    assert rates[10] == pytest.approx(0.5)
    for update in (20, 50, 99):
        expected = 0.1 + 0.9 * (1 + math.cos(math.pi * update / 100)) / 2
        assert rates[update] == pytest.approx(expected)


def test_schedule_of_a_polynomial() -> None:
    rates = _rates(schedule="polynomial", power=2.0)
    assert rates[10] == pytest.approx(0.5)
    for update in (20, 50, 99):
        assert rates[update] == pytest.approx(0.1 + 0.9 * (1 - update / 100) ** 2)


def test_schedule_in_steps() -> None:
    rates = _rates(schedule="steps", decay_at=[5, 8.05], decay_rate=0.5)
    assert rates[10] == pytest.approx(0.5)
    assert rates[20:50] == pytest.approx([1.0] * 30)
    assert rates[50:81] == pytest.approx([0.5] * 31)  # 8.05 epochs end within update 80
    assert rates[81:] == pytest.approx([0.25] * 19)


class _Stream:
    """What timm's streaming readers look like: eight images of two classes, in order."""

    def __iter__(self) -> Iterator[tuple[Image.Image, int]]:
        for index in range(8):
            yield Image.new("RGB", (24, 24), (30 * index,) * 3), index % 2

    def __len__(self) -> int:
        return 8


def test_streamed_dataset_trains_and_resumes_mid_epoch(
    tiny_fields: Fields, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(*_: object, **__: object) -> IterableImageDataset:
        return IterableImageDataset("", reader=_Stream())

    monkeypatch.setattr(timm.data, "create_dataset", create)
    stream = {"dataset": "wds/stream", "num_classes": 2}
    with pytest.raises(ConfigError, match=r"repeated_augmentation is 2; it must be 1 for wds/str"):
        _run(tiny_fields, **stream, repeated_augmentation=2)
    whole = _run(tiny_fields, **stream, output=str(tmp_path / "whole"))
    assert [row["update"] for row in whole.metrics["history"]] == [2, 4]
    config = resolve(tiny_fields(**stream, output=str(tmp_path / "parts")))
    with monkeypatch.context() as patch:
        _interrupt_at(patch, 2)
        with pytest.raises(Interrupted):
            train(config)
    assert _same_weights(train(config, resume=True).model, whole.model)


def test_average_warms_up_and_is_what_is_saved(tiny_fields: Fields) -> None:
    config = resolve(tiny_fields(ema_decay=0.9999, learning_rate=1e-2))
    result = train(config)
    saved = read_state(checkpoints(result.run_dir)[0])
    loaded, metadata = load_model(result.run_dir / "last.safetensors")
    assert metadata.averaged
    average, raw = saved.average["head.weight"], saved.model["head.weight"]
    assert torch.equal(loaded.head.weight, average)
    # Without warm-up, eight updates of 1e-4 each would leave the average at its start, zero or
    # next to it; with it, the average lags the weights by a few updates.
    assert not torch.equal(average, raw)
    torch.testing.assert_close(average, raw, rtol=0, atol=2e-2)
    assert (average - raw).norm() < 0.5 * raw.norm()


@pytest.mark.slow
def test_digits_recipe_reaches_its_accuracy(tmp_path: Path) -> None:
    result = train(recipes.load("digits", {"output": str(tmp_path / "digits")}))
    assert result.evaluation.accuracy >= 0.98


@pytest.mark.parametrize("foreach", [True, False])
def test_the_average_of_tied_weights_decays_once(foreach: bool) -> None:
    model = nn.Sequential(nn.Embedding(3, 3), nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3))
    for tied in (False, True):
        if tied:
            model[1].weight = model[0].weight
        nn.init.zeros_(model[0].weight)
        average = moving_average(model, 0.9, foreach=foreach)
        nn.init.ones_(model[0].weight)
        average.update(model)
        torch.testing.assert_close(average.module[0].weight, torch.full((3, 3), 0.1))
