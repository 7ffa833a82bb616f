"""A task from outside the package goes through the whole engine: nothing in it is about images."""

import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

import forked_python
import vision_ttt.engine
from vision_ttt import recipes, tasks
from vision_ttt.cli.main import main
from vision_ttt.data import EpochOrder
from vision_ttt.engine import CheckpointError, ConfigError, NonFiniteError, TrainConfig, step, train
from vision_ttt.engine.non_finite import replay
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.engine.step import seed_pass
from vision_ttt.tasks import load_model

sys.path.insert(0, str(Path(__file__).parent))
import toy_regression


def _config(tmp_path: Path, **changes: Any) -> TrainConfig:
    fields = {"task": "regression", "epochs": 4, "batch_size": 16, "learning_rate": 1e-2}
    return recipes.resolve({**fields, "output": str(tmp_path / "run"), **changes})


def _weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_model(run_dir / "last.safetensors", task="regression")[0].state_dict()


def test_it_trains_and_its_best_is_the_lowest_error(tmp_path: Path) -> None:
    result = train(_config(tmp_path, epochs=20))
    errors = [row["test_error"] for row in result.metrics["history"]]
    assert errors[-1] < 0.6 * errors[0]
    assert result.metrics["best_test_error"] == min(errors)
    model, metadata = load_model(result.run_dir / "best.safetensors", task="regression")
    assert metadata.epoch == 1 + errors.index(min(errors))
    assert metadata.task == {"name": "regression", "jitter": 0.0}
    assert metadata.carried == {"size": 8}
    predicted = model(result.task.test_set.vectors)
    error = (predicted - result.task.test_set.targets).square().mean().sqrt().item()
    assert error == pytest.approx(min(errors))
    assert "targets_per_second" in (result.run_dir / "metrics.csv").read_text().splitlines()[0]
    with pytest.raises(CheckpointError, match=r"holds a regression, not a classifier"):
        load_model(result.run_dir / "last.safetensors")


_COMMAND = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import toy_regression
from vision_ttt.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_killed_and_resumed_by_the_command_it_is_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    fields = {"jitter": 0.1, "ema_decay": 0.9, "checkpoint_every": 1, "seed": 3}
    whole = train(_config(tmp_path, output=str(tmp_path / "whole"), **fields))
    slow = _config(tmp_path, pause=0.005, **fields)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(slow.as_dict()))
    run_dir = Path(slow.run.output)
    with open(tmp_path / "said", "w") as file:
        arguments = ["-c", _COMMAND, "train", str(recipe)]
        process = forked_python.start(arguments, stdout=file, stderr=file)
        while len(checkpoints(run_dir)) < 2:
            assert process.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.01)
        process.kill()
        assert process.wait(10) == -signal.SIGKILL
    assert not (run_dir / "report.html").exists()
    assert main(["train", str(recipe), "--resume", "auto"]) == 0
    said = capsys.readouterr()
    assert "test error" in said.out
    assert re.search(r"epoch 4/4: train loss [\d.]+, test loss [\d.]+, test error [\d.]+", said.err)
    page = (run_dir / "report.html").read_text()
    assert "test error" in page
    assert "64 train vectors" in page
    for name, weight in _weights(run_dir).items():
        assert torch.equal(weight, whole.model.state_dict()[name])


def test_help_and_errors_are_of_the_task(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("task: regression\nrun: {output: x}\n")
    with pytest.raises(SystemExit):
        main(["train", str(recipe), "--help"])
    told = capsys.readouterr().out
    assert "--jitter" in told
    assert "--vectors" in told
    assert "--mixup" not in told
    assert main(["train", str(recipe), "--jiter", "1"]) == 2
    assert "unknown flag --jiter; nearest: --jitter" in capsys.readouterr().err
    assert main(["train", str(recipe), "--task.jitter", "-1"]) == 2
    assert "jitter is -1.0; it must be at least 0" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="unreadable is 65; it must be at most vectors"):
        _config(tmp_path, unreadable=65)


def test_damaged_items_are_counted_and_leave_the_mean(tmp_path: Path) -> None:
    with pytest.raises(toy_regression.VectorError, match=r"vector [01] is damaged"):
        train(_config(tmp_path, unreadable=2))
    config = _config(tmp_path, unreadable=2, skip_bad=True, epochs=1)
    result = train(config, overwrite=True)
    assert sorted(result.metrics["damaged_items"]) == ["0", "1"]
    with pytest.raises(ValueError, match="not one of the training targets can be read"):
        train(_config(tmp_path, unreadable=64, skip_bad=True), overwrite=True)


def test_the_gradient_is_that_of_the_mean_over_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    clip = step.clip_grads_with_norm_

    def keep(weights: list[torch.nn.Parameter], most: float, norm: torch.Tensor) -> None:
        seen.append(([weight.grad.clone() for weight in weights], norm))
        clip(weights, most, norm)

    monkeypatch.setattr(step, "clip_grads_with_norm_", keep)
    fields = {"epochs": None, "updates": 1, "unreadable": 20, "skip_bad": True}
    config = _config(tmp_path, **fields, accumulation_steps=4)
    train(config)
    ((gradients, norm),) = seen
    # The same by hand, from the weights before the update and the items of the first batch.
    seed_pass((config.run.seed,))
    task = config.task.open(config)
    model = task.build_model("", task.model_arguments())
    task.prepare(model)
    places = list(EpochOrder(64, batches=1, batch_size=16, seed=config.run.seed))
    good = [place for place in places if place >= 20]
    assert 0 < len(good) < 16
    (model(task.train_set.vectors[good]) - task.train_set.targets[good]).square().mean().backward()
    for gradient, weight in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, weight.grad)
    own = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm()
    torch.testing.assert_close(norm, own)


@pytest.mark.parametrize(
    ("length", "updates"),
    [({"epochs": 2}, 8), ({"updates": 6}, 6), ({"units": 16 * 3 * 5 - 1}, 5)],
)
def test_lengths_and_evaluations(tmp_path: Path, length: dict[str, int], updates: int) -> None:
    fields = {"epochs": None, **length, "evaluate_every": 3, "checkpoint_every": 2}
    result = train(_config(tmp_path, **fields))
    rows = result.metrics["history"]
    expected = sorted({*range(3, updates + 1, 3), updates})
    assert [row["update"] for row in rows] == expected
    assert [row["epoch"] for row in rows] == [update / 4 for update in expected]
    assert result.metrics["length"] == length
    assert result.metrics["finished"] is True
    assert rows[-1]["learning_rate"] < rows[0]["learning_rate"]
    assert checkpoints(result.run_dir)[0].stem == f"update-{updates:09d}"


def test_stopped_between_evaluations_it_goes_on_within_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"epochs": None, "updates": 7, "evaluate_every": 5, "checkpoint_every": 1}
    whole = train(_config(tmp_path, output=str(tmp_path / "whole"), **fields))
    config = _config(tmp_path, **fields)
    made = []
    original = toy_regression.Regression.loss

    def loss(self: Any, forward: Any, batch: Any, moment: Any) -> Any:
        made.append(moment.done)
        if len(made) == 4:
            raise KeyboardInterrupt
        return original(self, forward, batch, moment)

    with monkeypatch.context() as patch:
        patch.setattr(toy_regression.Regression, "loss", loss)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert made == [0, 1 / 7, 2 / 7, 3 / 7]
    resumed = train(config, resume=True)
    kept = ("update", "train_loss", "test_loss", "learning_rate")
    for row, other in zip(whole.metrics["history"], resumed.metrics["history"], strict=True):
        assert {name: row[name] for name in kept} == {name: other[name] for name in kept}


def test_nan_in_a_batch_is_named_and_can_be_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = toy_regression.Regression.collate

    def collate(self: Any, items: Any) -> Any:
        batch = original(self, items)
        batch["nested"] = [{"weights": torch.full((2,), torch.nan)}]
        batch["vectors"] = batch["vectors"] * torch.nan
        return batch

    monkeypatch.setattr(toy_regression.Regression, "collate", collate)
    with pytest.raises(NonFiniteError, match="the batch's vectors is not finite"):
        train(_config(tmp_path))
    (path,) = (tmp_path / "run" / "non-finite").iterdir()
    _, (only,), told = replay(path)
    assert set(only) == {"vectors", "targets", "indices", "nested/0/weights"}
    assert told["where"] == "the batch's vectors"
    save_file(only, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"other.safetensors does not hold a batch"):
        replay(tmp_path / "other.safetensors")


def test_the_table_refuses_a_second_task_of_a_name() -> None:
    assert tasks.find("regression") is toy_regression.RegressionSection
    with pytest.raises(ValueError, match="there is a task 'regression' already"):
        tasks.register(type("Other", (toy_regression.RegressionSection,), {}))


def test_the_engine_knows_no_task() -> None:
    words = re.compile(r"\b(images?|classes|accuracy|mixup|diffusion)\b", re.IGNORECASE)
    for file in sorted(Path(vision_ttt.engine.__path__[0]).glob("*.py")):
        text = file.read_text(encoding="utf-8")
        assert not words.search(text), (file.name, words.search(text))
        assert "vision_ttt.tasks" not in text, file.name
