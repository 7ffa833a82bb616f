"""Self-distillation between crops: the loss, the teacher, the run, and what starts from it."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightly")
from PIL import Image

from interrupted_runs import assert_same_run, run_through, train_until
from vision_ttt.cli.main import main
from vision_ttt.engine import ConfigError, train
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.engine.state import read_state
from vision_ttt.engine.task import Moment
from vision_ttt.recipes import resolve
from vision_ttt.tasks import load_model
from vision_ttt.tasks.dino.config import DinoSection
from vision_ttt.tasks.dino.crops import fixed_crops
from vision_ttt.tasks.dino.evaluation import neighbour_accuracy
from vision_ttt.tasks.dino.model import CropLoss
from vision_ttt.tasks.dino.task import Dino

Fields = Callable[..., dict]
OWN = {"outputs": 16, "hidden_dim": 24, "bottleneck_dim": 8, "local_crops": 3}


@pytest.fixture
def fields(tiny_fields: Fields) -> Fields:
    def make(**overrides: object) -> dict:
        common = {"task": "dino", "image_size": 16, "drop_path": 0.0, "ema_decay": 0.9, **OWN}
        return tiny_fields(**{**common, "color_jitter": 0.4, **overrides})

    return make


def test_the_loss_is_of_every_pair_of_different_crops(fields: Fields) -> None:
    config = resolve(fields())
    task = config.task.open(config)
    model, average = (
        task.build_model(config.model.name, task.model_arguments()).eval() for _ in range(2)
    )
    task.prepare(model)
    batch = task.collate([task.train_set[n] for n in (0, 5, 9)])
    large, small = batch["crops"]
    assert [tuple(each.shape) for each in (large, small)] == [(3, 2, 3, 16, 16), (3, 3, 3, 8, 8)]
    assert len(small.flatten(0, 1).unique(dim=0)) == 9
    assert torch.equal(task.collate([task.train_set[n] for n in (5,)])["crops"][0][0], large[1])
    center = torch.randn(16)
    model.criterion.center.copy_(center)
    loss, count = task.loss(model, batch, Moment(0.15, average))
    assert count == 3

    def outputs(of: torch.nn.Module, crops: torch.Tensor) -> list[torch.Tensor]:
        return [of.projection(of(each)) for each in crops.unbind(1)]

    wanted = outputs(average, large)
    heat = 0.04 + 0.15 / 0.3 * 0.03  # half of the warm-up
    teacher = [((each - center) / heat).softmax(-1) for each in wanted]
    student = [(o / 0.1).log_softmax(-1) for each in (large, small) for o in outputs(model, each)]
    pairs = [
        -(p * q).sum(-1) for t, p in enumerate(teacher) for s, q in enumerate(student) if t != s
    ]
    assert len(pairs) == 8
    torch.testing.assert_close(loss, torch.stack(pairs).mean(0).sum())
    moved = 0.9 * center + 0.1 * torch.cat(wanted).mean(0)
    torch.testing.assert_close(model.criterion.center[0, 0], moved)

    loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    assert all(p.grad is None for p in average.parameters())
    model.zero_grad(set_to_none=True)
    loss, count = task.loss(model, task.collate([]), Moment(0.0, average))
    assert (loss.item(), count) == (0.0, 0)
    loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    torch.testing.assert_close(model.criterion.center[0, 0], moved)
    assert [task.teacher_temperature(done) for done in (0.0, 0.3, 0.9)] == [0.04, 0.07, 0.07]


def test_outputs_that_are_not_finite_leave_the_center() -> None:
    criterion = CropLoss(3)
    criterion.move_center(torch.ones(6, 3))
    before = criterion.center.clone()
    assert before.max() > 0
    criterion.move_center(torch.full((2, 3), math.nan))
    assert torch.equal(criterion.center, before)


def test_a_skipped_update_leaves_the_teachers_center(
    fields: Fields, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = Dino.loss, itertools.count()

    def loss(self: Dino, *given: object) -> tuple[torch.Tensor, int]:
        value, count = original(self, *given)
        return value * (math.nan if next(calls) == 2 else 1.0), count

    monkeypatch.setattr(Dino, "loss", loss)
    options = {"epochs": 1, "checkpoint_every": 1, "keep_checkpoints": 4, "non_finite": "skip"}
    result = train(resolve(fields(**options)))
    assert result.metrics["skipped_updates"] == [2]
    _, before, after, _ = (read_state(path) for path in reversed(checkpoints(result.run_dir)))
    for part in ("model", "average"):
        values = [getattr(each, part)["criterion.center"] for each in (before, after)]
        assert torch.equal(*values), part


def test_the_teacher_follows_by_its_schedule(fields: Fields, tmp_path: Path) -> None:
    train(resolve(fields(checkpoint_every=1, keep_checkpoints=8)))
    states = [read_state(path) for path in reversed(checkpoints(tmp_path / "run"))]
    assert [state.state.update for state in states] == list(range(1, 9))
    for done, (before, after) in enumerate(itertools.pairwise(states), start=1):
        decay = 1 - 0.1 * (1 + math.cos(math.pi * done / 8)) / 2
        for name, weight in after.model.items():
            if name == "criterion.center":  # of the teacher's outputs, whoever evaluates them
                assert torch.equal(after.average[name], weight)
                continue
            expected = decay * before.average[name] + (1 - decay) * weight
            torch.testing.assert_close(after.average[name], expected)
    last = [
        state.model["projection.last_layer.parametrizations.weight.original1"] for state in states
    ]
    changes = [not torch.equal(*pair) for pair in itertools.pairwise(last)]
    assert changes == [False] * 3 + [True] * 4  # none in the first epoch
    first = [state.model["projection.layers.0.weight"] for state in states]
    assert not torch.equal(first[0], first[1])


def test_neighbours_vote_by_their_cosines() -> None:
    angles = torch.tensor([0.0, 0.3, 0.31, 0.32, *[2.0] * 30])
    known = torch.stack([angles.cos(), angles.sin()], dim=1)
    labels = torch.tensor([0, 1, 1, 1, *[2] * 30])
    near = torch.tensor([[1.0, 0.0]])
    # Of 20 votes 16 are for 2, from afar, 3 for 1 and the nearest for 0: e^(1 / 0.07) of it against
    # 3 e^(0.952 / 0.07).
    for wanted in range(3):
        assert neighbour_accuracy(near, torch.tensor([wanted]), known, labels) == (wanted == 1)
    far = torch.tensor([[math.cos(1.9), math.sin(1.9)]])
    assert neighbour_accuracy(far, torch.tensor([2]), known[:5], labels[:5]) == 1.0


def test_the_crops_of_the_test_loss_are_fixed() -> None:
    images = torch.arange(16.0).repeat(1, 3, 16, 1)  # each pixel its column
    large, small = fixed_crops(images, 8, DinoSection(global_scale=0.4, local_scale=0.1))
    assert torch.equal(large[:, 0], images)
    assert large[0, 1].mean() == pytest.approx(7.5, abs=0.5)  # an odd side is rounded
    assert large[0, 1].min() > 1  # the middle
    left, right, lower_left, lower_right = small[0, :, 0]
    assert left.max() == lower_left.max() == 7
    assert right.min() == lower_right.min() == 8


def test_it_runs_tells_and_starts_a_classifier(
    fields: Fields, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(resolve(fields(epochs=1)).as_dict()))
    assert main(["train", str(recipe)]) == 0
    assert "20 nearest neighbours" in capsys.readouterr().out
    run_dir = tmp_path / "run"
    assert "nearest training images" in (run_dir / "report.html").read_text()
    metrics = json.loads((run_dir / "metrics.json").read_text())
    weights = run_dir / "last.safetensors"
    assert main(["eval", str(weights), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["neighbour_accuracy"] == metrics["test_neighbour_accuracy"]
    assert told["loss"] == pytest.approx(metrics["test_loss"])
    assert main(["eval", str(weights), "--split", "train"]) == 2
    assert "part is 'train' (--split); it must be 'test'" in capsys.readouterr().err

    dropped = {"ema_decay", "color_jitter", *OWN}
    kept = {key: value for key, value in fields().items() if key not in dropped}
    start = {"initial_weights": str(weights), "frozen_layers": "all", "epochs": 1}
    classifier = {"task": "classification", "output": str(tmp_path / "next")}
    result = train(resolve({**kept, **start, **classifier}))
    own = load_model(weights, task="dino")[0].backbone.state_dict()
    for name, value in result.model.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(value, own[name]), name


def test_killed_and_resumed_it_is_the_same_run(fields: Fields, tmp_path: Path) -> None:
    train(resolve(fields(output=str(tmp_path / "whole"))))
    config = resolve(fields(output=str(tmp_path / "parts"), checkpoint_every=3))
    train_until(config, 4)
    train(config, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    state = read_state(checkpoints(tmp_path / "parts")[0])
    assert state.model["criterion.center"].abs().max() > 0


@pytest.mark.parametrize(
    "sharding", ["replicated", pytest.param("sharded", marks=pytest.mark.slow)]
)
def test_two_processes_train_what_one_does(fields: Fields, tmp_path: Path, sharding: str) -> None:
    options = {"epochs": 1, "frozen_epochs": 0, "learning_rate": 1e-4, "teacher_temperature": 1.0}
    train(resolve(fields(**options, output=str(tmp_path / "one"))))
    two = fields(**options, output=str(tmp_path / "two"), sharding=sharding)
    run_through([(two, [])], tmp_path, processes=2)
    assert_same_run(tmp_path / "one", tmp_path / "two", tolerance=1e-5)


def test_a_damaged_image_is_left_out(fields: Fields, image_folder: Path) -> None:
    (image_folder / "train" / "dark" / "3.png").write_bytes(b"x")
    result = train(resolve(fields(skip_bad=True, epochs=1, local_crops=0)))
    assert len(result.metrics["damaged_items"]) == 1
    assert math.isfinite(result.metrics["test_loss"])


def test_a_grey_picture_is_cropped(fields: Fields) -> None:
    config = resolve(fields(color_jitter=0.0, solarize=1.0, horizontal_flip=1.0))
    task = config.task.open(config)
    task.prepare(task.build_model(config.model.name, task.model_arguments()))
    picture = Image.new("RGB", (24, 24), (200, 200, 200))
    first, second = task.train_set.transform((picture, 0), 0)[0][0]
    assert first.mean() > second.mean()  # which is solarised


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
        ({"local_scale": 0.6}, r"local_scale is 0.6; it must be at most global_scale \(0.4\)"),
        ({"outputs": 1}, "outputs is 1; it must be from 2 to"),
        ({"teacher_temperature": 0.0}, "teacher_temperature is 0.0; it must be above 0"),
        ({"crop_scale": 0.5}, "crop_scale is 0.5; it must be 0.08, as the task dino makes crops"),
        ({"auto_augment": "3a", "color_jitter": 0.0}, "auto_augment is '3a'; it must be None"),
        ({"color_jitter": 3.0}, "color_jitter is 3.0; it must be at most 2 in the task dino"),
        (
            {"local_crops": 0, "local_size": 8},
            "local_size is 8; it must be None, as local_crops is 0",
        ),
        (
            {"temperature_warmup": 0, "first_teacher_temperature": 0.05},
            "first_teacher_temperature is 0.05; it must be 0.04, as temperature_warmup is 0",
        ),
        ({"naflex": 16}, "naflex is 16; it must be null, as the task dino takes images of one"),
    ],
)
def test_fields_that_do_not_fit(fields: Fields, overrides: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve(fields(**overrides))
