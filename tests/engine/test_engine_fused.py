"""Runs whose layers are fused: the same training, and checkpoints that know nothing of it."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tolerances import assert_close
from vision_ttt.cli.main import main
from vision_ttt.engine import ConfigError, TrainConfig, TrainResult, train
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.engine.tensor_files import read_tensors, write_tensors
from vision_ttt.explain import trace_layers
from vision_ttt.layers import SwiGLU, TTTLinear
from vision_ttt.models import create_model
from vision_ttt.models.arguments import FUSED
from vision_ttt.models.vittt_ablations import ABLATIONS
from vision_ttt.recipes import change, resolve
from vision_ttt.tasks import load_model

Fields = Callable[..., dict]
Said = pytest.CaptureFixture[str]
WEIGHTS = "last.safetensors"


@pytest.fixture
def config(tiny_fields: Fields) -> TrainConfig:
    fields = tiny_fields(epochs=1)
    assert all(fields["arguments"][name] for name in FUSED)
    fields["arguments"]["mlp_ratio"] = 2.0  # of this width the kernels serve
    return resolve(fields)


def _unfused(config: TrainConfig, **changes: object) -> TrainConfig:
    return change(config, {"arguments": dict.fromkeys(FUSED), **changes})


def _hook_runs(model: nn.Module) -> bool:
    """Whether a hook on a part of an MLP runs, and one on a part of a TTT layer."""
    fired = []
    for path in ("blocks.0.mlp.fc1", "blocks.0.mixer.ttt.merge"):
        model.get_submodule(path).register_forward_hook(lambda *_, path=path: fired.append(path))
    model(torch.randn(1, 3, 32, 32))
    return len(fired) == 2


def test_a_run_trains_fused_layers_and_leaves_a_model_without(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    for kind in (TTTLinear, SwiGLU):
        forward = kind.forward

        def spy(layer: nn.Module, x: torch.Tensor, forward: Callable = forward) -> torch.Tensor:
            states.append((layer.training, layer.fused))
            return forward(layer, x)

        monkeypatch.setattr(kind, "forward", spy)
    result = train(config)
    assert {fused for training, fused in states if training} == {True}
    monkeypatch.undo()
    model, metadata = load_model(result.run_dir / WEIGHTS)
    assert not set(FUSED) & set(metadata.model_args)
    assert _hook_runs(model)
    assert _hook_runs(result.model)
    assert trace_layers(model, torch.randn(1, 3, 32, 32))


def _check_same_training(one: TrainResult, two: TrainResult, tolerance: float) -> None:
    losses = (
        torch.tensor([row["train_loss"] for row in result.metrics["history"]])
        for result in (one, two)
    )
    assert_close(*losses, tolerance)
    for (name, a), b in zip(one.model.named_parameters(), two.model.parameters(), strict=True):
        # AdamW makes large steps of the smallest gradients, whatever their rounding.
        assert (a - b).abs().max() < tolerance, name


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-4),
        ({"gradient_checkpointing": True, "ema_decay": 0.9, "accumulation_steps": 2}, 1e-4),
        ({"frozen_layers": 1}, 1e-4),
        ({"precision": "bfloat16"}, 1e-2),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_it_is_the_training_of_the_parts(
    config: TrainConfig, tmp_path: Path, options: dict, tolerance: float
) -> None:
    config = change(config, {**options})
    parts = train(_unfused(config, output=str(tmp_path / "parts")))
    _check_same_training(train(config), parts, tolerance)


@pytest.mark.parametrize("first", [True, False], ids=["fused first", "fused then"])
def test_a_run_goes_on_with_the_switches_set_otherwise(config: TrainConfig, first: bool) -> None:
    config = change(config, {"epochs": 2})
    before, after = (config, _unfused(config)) if first else (_unfused(config), config)
    run_dir = train(before).run_dir
    checkpoints(run_dir)[0].unlink()
    result = train(after, resume=True)
    assert [row["epoch"] for row in result.metrics["history"]] == [1, 2]
    another = change(after, {"arguments": {"depth": 2}})
    with pytest.raises(ConfigError, match=r"cannot be resumed .*: model\.arguments \{'depth': 1"):
        train(another, resume=True)


@pytest.fixture
def old_checkpoint(config: TrainConfig, tmp_path: Path) -> Path:
    """Weights whose metadata holds the switches, as former versions wrote them."""
    weights, text = read_tensors(train(config).run_dir / WEIGHTS)
    told = json.loads(text)
    told["model_args"] |= dict.fromkeys(FUSED, True)
    write_tensors(tmp_path / "old.safetensors", weights, json.dumps(told))
    return tmp_path / "old.safetensors"


def test_old_metadata_that_holds_the_switches_is_that_of_the_parts(old_checkpoint: Path) -> None:
    model, metadata = load_model(old_checkpoint)
    assert not set(FUSED) & set(metadata.model_args)
    assert _hook_runs(model)


@pytest.mark.parametrize("old", [True, False], ids=["old", "new"])
def test_every_command_takes_the_checkpoint(
    old_checkpoint: Path, old: bool, image_folder: Path, tmp_path: Path, capsys: Said
) -> None:
    checkpoint = str(old_checkpoint if old else tmp_path / "run" / WEIGHTS)
    images = str(image_folder / "val" / "dark")
    assert main(["eval", checkpoint]) == 0
    assert main(["predict", images, "--checkpoint", checkpoint]) == 0
    assert main(["predict", images, "--checkpoint", checkpoint, "--dtype", "bfloat16"]) == 0
    for name in ("folder", "model.pt2"):
        assert main(["export", checkpoint, str(tmp_path / name)]) == 0
    told = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert not set(FUSED) & set(told["model_args"])
    assert "fused" not in capsys.readouterr().err


@pytest.mark.parametrize("fused", [True, False])
def test_fine_tuning_minds_no_switch(
    old_checkpoint: Path,
    config: TrainConfig,
    fused: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for number, weights in enumerate((old_checkpoint, tmp_path / "run" / WEIGHTS)):
        start = change(
            config if fused else _unfused(config),
            {"initial_weights": str(weights), "output": str(tmp_path / f"tuned-{number}")},
        )
        with caplog.at_level("INFO", "vision_ttt"):
            train(start)
        assert "tensors taken." in caplog.text
        assert "Mind" not in caplog.text


@pytest.mark.parametrize(
    ("flags", "flagged"),
    [
        (["--arguments.inner_model", "mlp"], ["fused"]),
        (["--arguments.design", "gating"], ["fused"]),
        (["--model", "deit_tiny_patch16_224"], ["fused", "fused_mlp"]),
        (["--model", "vit3_tiny_patch16_224"], ["fused", "fused_mlp"]),
        (["--model", "vittt_tiny_gating_patch16_224"], ["fused"]),
    ],
)
def test_what_cannot_be_fused_names_the_way_out(
    flags: list[str], flagged: list[str], tmp_path: Path, capsys: Said
) -> None:
    argv = ["train", "digits", "--output", str(tmp_path / "run"), *flags]
    assert main(argv) == 2
    (said,) = capsys.readouterr().err.splitlines()
    remedy = " ".join(f"--arguments.{name} null" for name in flagged)
    assert said.endswith(f"; it trains without {' and '.join(flagged)}: {remedy}")
    assert main([*argv, *remedy.split(), "--arguments.drop_rate", "2"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "drop_rate" in said
    assert "it trains without" not in said


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablations_take_back_what_they_cannot_have(name: str) -> None:
    with torch.device("meta"):
        on = dict.fromkeys(FUSED, True)
        model = create_model("vittt_nano_patch4_32", **{**on, **ABLATIONS[name].keywords})
    fused = {module.fused for module in model.modules() if isinstance(module, TTTLinear)}
    assert fused == {name not in ("ttt_layer", "shared_qk", "gating")}
    assert all(module.fused for module in model.modules() if isinstance(module, SwiGLU))


def test_compiled_training(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = train(config)
    compile_as = functools.partial(torch.compile, backend="aot_eager")  # Inductor takes minutes
    monkeypatch.setattr("vision_ttt.engine.step.torch.compile", compile_as)
    compiled = train(change(config, {"compile": True, "output": str(tmp_path / "compiled")}))
    _check_same_training(eager, compiled, 1e-4)
