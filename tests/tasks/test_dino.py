"""Self-distillation between crops: the loss, the center, the run, and what starts from it."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from interrupted_runs import run_through
from vision_ttt.cli.main import main
from vision_ttt.engine import ConfigError, train
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.engine.state import read_state
from vision_ttt.engine.step import Step
from vision_ttt.engine.task import Moment
from vision_ttt.recipes import resolve
from vision_ttt.tasks import load_model
from vision_ttt.tasks.dino.model import Projection, crop_losses
from vision_ttt.tasks.dino.task import neighbour_accuracy

Fields = Callable[..., dict]


@pytest.fixture
def fields(tiny_fields: Fields) -> Fields:
    def make(**overrides: object) -> dict:
        common = {"task": "dino", "image_size": 16, "drop_path": 0.0, "ema_decay": 0.9}
        common |= {"outputs": 16, "local_crops": 3, "crop_scale": 0.5, "local_scale": 0.2}
        return tiny_fields(**{**common, **overrides})

    return make


def test_the_loss_is_of_every_pair_of_different_crops() -> None:
    torch.manual_seed(0)
    teacher = torch.randn(2, 2, 5).softmax(-1)
    large, small = torch.randn(2, 2, 5).log_softmax(-1), torch.randn(2, 3, 5).log_softmax(-1)
    for image, loss in enumerate(crop_losses([large, small], teacher)):
        seen = [*large[image], *small[image]]
        pairs = [
            -(p * q).sum()
            for t, p in enumerate(teacher[image])
            for s, q in enumerate(seen)
            if t != s
        ]
        assert len(pairs) == 8
        torch.testing.assert_close(loss, sum(pairs) / 8)


def test_the_center_is_a_running_mean() -> None:
    projection = Projection(4, 3)
    first, second = torch.randn(6, 3), torch.randn(2, 3)
    projection.move_center(first, 0.9)
    projection.move_center(second, 0.5)
    torch.testing.assert_close(projection.center, 0.05 * first.mean(0) + 0.5 * second.mean(0))
    before = projection.center.clone()
    projection.move_center(torch.full((2, 3), math.nan), 0.5)
    assert torch.equal(projection.center, before)


def test_neighbours_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    angles = torch.tensor([0.0, 0.1, 0.25, 2.0, 2.1])
    features = torch.stack([angles.cos(), angles.sin()], dim=1)
    targets = torch.tensor([0, 0, 1, 1, 1])
    for chunk in (2, 4096):
        monkeypatch.setattr("vision_ttt.tasks.dino.task._CHUNK", chunk)
        assert neighbour_accuracy(features, targets) == 0.8  # the third one's is the second


def test_teacher_and_student_see_their_crops(fields: Fields) -> None:
    config = resolve(fields())
    task = config.task.open(config)
    model, average = (
        task.build_model(config.model.name, task.model_arguments()).eval() for _ in range(2)
    )
    task.prepare(model)
    batch = task.collate([task.train_set[n] for n in (0, 5, 9)])
    assert [tuple(each.shape) for each in batch["crops"]] == [(3, 2, 3, 16, 16), (3, 3, 3, 8, 8)]
    assert len(batch["crops"][1].flatten(0, 1).unique(dim=0)) == 9
    center = torch.randn(16)
    model.projection.center.copy_(center)
    loss, count = task.loss(model, batch, Moment(0.0, average))
    assert count == 3

    def outputs(of: torch.nn.Module, crops: torch.Tensor) -> torch.Tensor:
        features = [of(each) for each in crops.unbind(1)]
        return torch.stack([of.projection(each) for each in features], dim=1)

    teacher = (outputs(average, batch["crops"][0]) - center) / 0.04
    student = [outputs(model, each) / 0.1 for each in batch["crops"]]
    wanted = crop_losses([each.log_softmax(-1) for each in student], teacher.softmax(-1)).sum()
    torch.testing.assert_close(loss, wanted)
    assert not torch.equal(model.projection.center, center)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(p.grad is None for p in average.parameters())
    model.zero_grad(set_to_none=True)
    loss, count = task.loss(model, task.collate([]), Moment(0.0, average))
    assert (loss.item(), count) == (0.0, 0)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_it_runs_tells_and_starts_a_classifier(
    fields: Fields, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(resolve(fields(epochs=1)).as_dict()))
    assert main(["train", str(recipe)]) == 0
    said = capsys.readouterr()
    assert "nearest neighbours of one class" in said.out
    run_dir = tmp_path / "run"
    metrics = json.loads((run_dir / "metrics.json").read_text())
    weights = run_dir / "last.safetensors"
    assert main(["eval", str(weights), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["neighbour_accuracy"] == metrics["test_neighbour_accuracy"]
    start = {"initial_weights": str(weights), "frozen_layers": "all", "epochs": 1}
    classifier = {"task": "classification", "output": str(tmp_path / "next")}
    kept = {
        key: value
        for key, value in fields().items()
        if key not in ("outputs", "local_crops", "local_scale", "ema_decay")
    }
    result = train(resolve({**kept, **start, **classifier}))
    own = load_model(weights, task="dino")[0].backbone.state_dict()
    for name, value in result.model.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(value, own[name]), name


def test_killed_and_resumed_it_is_the_same_run(
    fields: Fields, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(resolve(fields(output=str(tmp_path / "whole"))))
    config = resolve(fields(output=str(tmp_path / "parts"), checkpoint_every=3))
    original, made = Step.__call__, []

    def step(self: Step, *arguments: object) -> object:
        made.append(True)
        if len(made) == 5:
            raise KeyboardInterrupt
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "__call__", step)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    train(config, resume=True)
    one, other = (read_state(checkpoints(tmp_path / n)[0]) for n in ("whole", "parts"))
    assert one.model["projection.center"].abs().max() > 0
    for part in ("model", "average", "moments"):
        tensors, others = getattr(one, part), getattr(other, part)
        assert all(torch.equal(value, others[name]) for name, value in tensors.items()), part


def test_two_processes_train_what_one_does(fields: Fields, tmp_path: Path) -> None:
    options = {"epochs": 1, "learning_rate": 1e-4, "teacher_temperature": 1.0}
    train(resolve(fields(**options, output=str(tmp_path / "one"))))
    run_through([(fields(**options, output=str(tmp_path / "two")), [])], tmp_path, processes=2)
    one, other = (read_state(checkpoints(tmp_path / n)[0]) for n in ("one", "two"))
    for part in ("model", "average"):
        tensors, others = getattr(one, part), getattr(other, part)
        gaps = {name: (others[name] - value).abs().max() for name, value in tensors.items()}
        assert max(gaps.values()) <= 1e-5, part


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"ema_decay": 0.0}, "ema_decay is 0; it must be above 0, as the weights' moving average"),
        ({"local_size": 10}, "cannot take images of 10 × 10 pixels"),
        ({"model": "resnet18", "arguments": {}}, "model resnet18 cannot be built|not a plain"),
    ],
)
def test_what_does_not_fit_leaves_no_run_directory(
    fields: Fields, overrides: dict, told: str
) -> None:
    config = resolve(fields(**overrides))
    with pytest.raises(ConfigError, match=told):
        train(config)
    assert not Path(config.run.output).exists()


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"local_scale": 0.6}, r"local_scale is 0.6; it must be at most crop_scale \(0.5\)"),
        ({"outputs": 1}, "outputs is 1; it must be from 2 to"),
        ({"teacher_temperature": 0.0}, "teacher_temperature is 0.0; it must be above 0"),
    ],
)
def test_fields_out_of_range(fields: Fields, overrides: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve(fields(**overrides))
