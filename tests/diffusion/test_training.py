"""A diffusion model in the one training loop: it learns, repeats itself, resumes and tells."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from interrupted_runs import train_until
from vision_ttt.engine import CheckpointError, ConfigError, NonFiniteError, TrainResult, train
from vision_ttt.engine.task import Moment
from vision_ttt.layers import DiT3Head
from vision_ttt.models import DiT3
from vision_ttt.recipes import resolve
from vision_ttt.tasks import load_model
from vision_ttt.tasks.diffusion import DiffusionSection

Fields = Callable[..., dict]
SMALL = {"hidden_size": 32, "depth": 1, "num_heads": 2}
TIMES = ("seconds", "images_per_second", "data_share", "memory_bytes")


@pytest.fixture
def fields(tiny_fields: Fields) -> Fields:
    """Fields of a run of a tiny diffusion model: two epochs of four updates."""

    def make(**overrides: object) -> dict:
        model_args = {**SMALL, **overrides.pop("arguments", {})}
        common = {"task": "diffusion", "model": "dit3_nano_patch4_32", "image_size": 8}
        common |= {"drop_path": None}
        return tiny_fields(**{**common, "arguments": model_args, **overrides})

    return make


FLOW = {"objective": "flow", "arguments": {"learn_sigma": False}}
EVERYTHING = {
    "noise_schedule": "cosine",
    "noise_steps": 100,
    "ema_decay": 0.9,
    "accumulation_steps": 2,
    "gradient_checkpointing": True,
    "layer_decay": 0.8,
    "precision": "bfloat16",
}


def _rows(result: TrainResult) -> list[dict]:
    history = result.metrics["history"]
    return [{key: x for key, x in row.items() if key not in TIMES} for row in history]


def _same_weights(first: nn.Module, second: nn.Module) -> bool:
    others = second.state_dict()
    return all(torch.equal(weight, others[name]) for name, weight in first.state_dict().items())


@pytest.mark.parametrize("options", [{}, FLOW], ids=["noise", "flow"])
def test_it_learns(fields: Fields, options: dict) -> None:
    result = train(
        resolve(fields(**options, epochs=15, learning_rate=8e-3, crop_scale=1.0, ema_decay=0.5))
    )
    first, *_, last = result.metrics["history"]
    assert last["train_loss"] < 0.8 * first["train_loss"]
    assert last["test_loss"] < 0.8 * first["test_loss"]
    assert not [name for name in result.metrics if "accuracy" in name]
    assert result.metrics["best_test_loss"] == min(
        row["test_loss"] for row in result.metrics["history"]
    )
    assert result.evaluation.losses.shape == (8,)
    assert result.evaluation.loss == pytest.approx(result.evaluation.losses.mean().item())
    losses = [row["test_loss"] for row in result.metrics["history"]]
    _, best = load_model(result.run_dir / "best.safetensors", task="diffusion")
    assert best.epoch == 1 + losses.index(min(losses))


@pytest.mark.parametrize("options", [{"noise_steps": 5}, {"class_dropout_prob": 0.0}])
def test_the_report_samples_as_the_model_can(fields: Fields, options: dict) -> None:
    own = fields(epochs=1)
    if "class_dropout_prob" in options:
        options = {"arguments": {**own["arguments"], **options}}
    result = train(resolve({**own, **options}))
    result.task.report(result)
    assert (result.run_dir / "samples.png").is_file()


def test_what_a_checkpoint_tells(fields: Fields) -> None:
    result = train(resolve(fields(epochs=1, noise_schedule="cosine", noise_steps=50)))
    path = result.run_dir / "last.safetensors"
    model, metadata = load_model(path, task="diffusion")
    assert isinstance(model, DiT3)
    assert _same_weights(model, result.model)
    process = {"objective": "noise", "schedule": "cosine", "steps": 50}
    assert metadata.carried["process"] == process
    assert metadata.task == {
        **{"name": "diffusion", "objective": "noise"},
        **{"noise_schedule": "cosine", "noise_steps": 50},
        **{"autoencoder": None, "latents": None},
    }
    assert list(metadata.carried["input"]["input_size"]) == [3, 8, 8]
    assert metadata.carried["input"]["mean"] == [0.5] * 3  # pixels from -1 to 1
    assert metadata.carried["classes"] == ["dark", "light"]
    assert metadata.metrics == {"test_loss": result.evaluation.loss}
    columns = (result.run_dir / "metrics.csv").read_text().splitlines()[0].split(",")
    assert [name for name in columns if name.startswith("test_")] == ["test_loss"]
    with pytest.raises(CheckpointError, match=r"holds a diffusion model .* not a classifier"):
        load_model(path)
    assert load_model(path, task=None)[1] == metadata
    # Neither is a classifier a diffusion model.
    classifier = train(
        resolve(
            {
                **fields(epochs=1, output=str(result.run_dir.parent / "classifier")),
                "task": "classification",
                "model": "vittt_nano_patch4_32",
                "arguments": {"depth": 1, "embed_dim": 32, "num_heads": 1},
            }
        )
    )
    with pytest.raises(CheckpointError, match=r"holds a classifier .* not a diffusion model"):
        load_model(classifier.run_dir / "last.safetensors", task="diffusion")


def test_same_seed_same_run(fields: Fields, tmp_path: Path) -> None:
    first, second, other = (
        train(resolve(fields(epochs=1, output=str(tmp_path / str(n)), seed=seed)))
        for n, seed in enumerate((0, 0, 1))
    )
    assert _rows(first) == _rows(second)
    assert _same_weights(first.model, second.model)
    assert not _same_weights(first.model, other.model)


@pytest.mark.parametrize(
    ("options", "updates"), [(FLOW, 3), (EVERYTHING, 5)], ids=["flow", "everything"]
)
def test_killed_and_resumed_is_the_same_run(
    fields: Fields, tmp_path: Path, options: dict, updates: int
) -> None:
    whole = train(resolve(fields(**options, output=str(tmp_path / "whole"))))
    config = resolve(fields(**options, output=str(tmp_path / "parts"), checkpoint_every=updates))
    train_until(config, updates + 1)  # one more is lost
    resumed = train(config, resume=True)
    assert _same_weights(whole.model, resumed.model)
    assert _rows(whole) == _rows(resumed)
    assert torch.equal(whole.evaluation.losses, resumed.evaluation.losses)


def test_test_loss_is_of_the_same_noise_each_time(fields: Fields) -> None:
    result = train(resolve(fields(epochs=1)))
    again = train(resolve(fields(epochs=1)), resume=True)  # evaluates once more
    assert torch.equal(again.evaluation.losses, result.evaluation.losses)
    assert len(set(result.evaluation.losses.tolist())) == 8


def test_the_model_hears_classes_and_no_class(fields: Fields) -> None:
    heard = []
    original = DiT3.forward

    def forward(self: DiT3, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        heard.append((self.training, x.abs().max().item(), t.tolist(), y.tolist()))
        return original(self, x, t, y)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiT3, "forward", forward)
        train(resolve(fields(epochs=1)))
    training = [each for each in heard if each[0]]
    assert len(training) == 4
    assert {label for *_, labels in heard for label in labels} == {0, 1}
    times = [time for *_, times, _ in training for time in times]
    assert len(set(times)) > 10
    assert all(0 <= time < 1000 for time in times)
    assert len({time for is_training, _, own, _ in heard if not is_training for time in own}) > 6


def test_a_batch_without_an_image_has_a_loss_of_zero(fields: Fields) -> None:
    for objective in ("noise", "flow"):
        config = resolve(fields(objective=objective))
        model = DiT3(8, 4, 3, 32, 1, 2, 2, learn_sigma=objective == "noise")
        empty = {"images": torch.empty(0, 3, 8, 8), "targets": torch.empty(0, dtype=torch.int64)}
        loss, count = config.task.open(config).loss(model, empty, Moment(0.0, None))
        assert (loss.item(), count) == (0, 0)
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"objective": "flow"}, "objective is 'flow', which has no variances to learn"),
        ({"drop_path": 0.1}, "drop_path_rate"),
        ({"frozen_layers": 1}, "frozen_layers: DiT3 does not name its layers and its head"),
        ({"image_size": 10}, "images of 10 × 10 are not whole patches of 4 × 4"),
    ],
)
def test_what_does_not_fit_leaves_no_run_directory(
    fields: Fields, overrides: dict, told: str
) -> None:
    config = resolve(fields(**overrides))
    with pytest.raises(ConfigError, match=told):
        train(config)
    assert not Path(config.run.output).exists()


def test_a_model_that_does_not_denoise_leaves_no_run_directory(fields: Fields) -> None:
    config = resolve({**fields(), "model": "vittt_nano_patch4_32", "arguments": {"depth": 1}})
    with pytest.raises(ConfigError, match=r"vittt_nano_patch4_32 does not denoise; .* dit3_"):
        train(config)
    assert not Path(config.run.output).exists()


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            {"mixup": 0.5},
            "unknown key 'mixup': task.mixup is of task classification, the run's is diffusion",
        ),
        ({"label_smoothing": 0.3}, "unknown key 'label_smoothing': .* is of task classification"),
        (
            {"objective": "flow", "noise_steps": 10, "arguments": {"learn_sigma": False}},
            "noise_steps is 10; it must be 1000, as objective is 'flow'",
        ),
        (
            {"objective": "flow", "noise_schedule": "cosine"},
            "noise_schedule is 'cosine'; it must be 'linear', as objective is 'flow'",
        ),
    ],
)
def test_fields_that_have_no_use_are_refused(fields: Fields, overrides: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve(fields(**overrides))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"objective": "score"}, "objective is 'score'; it must be noise or flow"),
        ({"noise_schedule": "sigmoid"}, "noise_schedule is 'sigmoid'"),
        ({"noise_steps": 1}, "noise_steps is 1; it must be from 2 to 100,000"),
    ],
)
def test_fields_out_of_range(overrides: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DiffusionSection(**overrides)


def test_nan_names_its_place(fields: Fields, monkeypatch: pytest.MonkeyPatch) -> None:
    original = DiT3Head.forward
    monkeypatch.setattr(DiT3Head, "forward", lambda *inputs: math.nan * original(*inputs))
    with pytest.raises(NonFiniteError, match=r"the output of module 'head' is not finite"):
        train(resolve(fields()))


def test_a_run_from_before_a_field_resumes(fields: Fields) -> None:
    """A state that does not know a field of today had its default."""
    config = resolve(fields(epochs=1))
    train(config)
    module = sys.modules["vision_ttt.engine.run_directory"]
    original = module.open_state

    def older(path: Path, **options: object) -> object:
        saved = original(path, **options)
        for name in ("objective", "noise_schedule", "noise_steps"):
            del saved.state.config["task"][name]
        return saved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "open_state", older)
        train(config, resume=True)
        with pytest.raises(ConfigError, match=r"task\.objective 'noise' -> 'flow'"):
            train(resolve(fields(**FLOW, epochs=1)), resume=True)


def test_metrics_are_json(fields: Fields) -> None:
    result = train(resolve(fields(epochs=1)))
    metrics = json.loads((result.run_dir / "metrics.json").read_text())
    assert metrics == result.metrics
    assert metrics["history"][0]["inner_losses"] == {}
