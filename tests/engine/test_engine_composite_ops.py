"""Runs that train by composite ops: the same training, and checkpoints that do not record it."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tolerances import assert_close
from vision_ttt.acceleration import COMPOSITES
from vision_ttt.acceleration.composite_vittt import CompositeVitttBlock
from vision_ttt.cli.main import main
from vision_ttt.engine import ConfigError, TrainConfig, TrainResult, train
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.recipes import change, resolve
from vision_ttt.tasks import load_model

Fields = Callable[..., dict]
Said = pytest.CaptureFixture[str]
WEIGHTS = "last.safetensors"


@pytest.fixture
def config(tiny_fields: Fields) -> TrainConfig:
    fields = tiny_fields(epochs=1)
    fields["arguments"]["mlp_ratio"] = 2.0  # of this width the kernels serve
    return resolve(fields)


def _plain(config: TrainConfig, **changes: object) -> TrainConfig:
    return change(config, {"composite_ops": False, **changes})


def _is_plain(model: nn.Module) -> bool:
    return not any(isinstance(module, COMPOSITES) for module in model.modules())


def test_a_run_trains_by_composite_ops_and_leaves_a_plain_model(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, is_plain = set(), CompositeVitttBlock._trains_by_op

    def spy(block: CompositeVitttBlock) -> bool:
        seen.add((block.training, is_plain(block)))
        return is_plain(block)

    monkeypatch.setattr(CompositeVitttBlock, "_trains_by_op", spy)
    result = train(config)
    assert (True, True) in seen
    model, metadata = load_model(result.run_dir / WEIGHTS)
    assert "composite_ops" not in str(metadata.model_args)
    assert _is_plain(model)
    assert _is_plain(result.model)
    seen.clear()
    train(_plain(config, output=str(result.run_dir) + "-plain"))
    assert not seen


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
    parts = train(_plain(config, output=str(tmp_path / "parts")))
    _check_same_training(train(config), parts, tolerance)


@pytest.mark.parametrize("first", [True, False], ids=["composite first", "composite then"])
def test_a_run_goes_on_the_other_way(config: TrainConfig, first: bool) -> None:
    config = change(config, {"epochs": 2})
    before, after = (config, _plain(config)) if first else (_plain(config), config)
    run_dir = train(before).run_dir
    checkpoints(run_dir)[0].unlink()
    result = train(after, resume=True)
    assert [row["epoch"] for row in result.metrics["history"]] == [1, 2]
    another = change(after, {"arguments": {"depth": 2}})
    with pytest.raises(ConfigError, match=r"cannot be resumed .*: model\.arguments \{'depth': 1"):
        train(another, resume=True)


@pytest.mark.parametrize(
    ("flags", "stays"),
    [
        (
            ["--arguments.design", "gating"],
            "blocks.0.mixer.ttt (conv_q is a Identity, not a DirectionalConv1d)",
        ),
        (["--model", "vit3_nano_patch4_32", "--arguments.num_heads", "2"], ""),
    ],
)
def test_a_run_says_what_has_no_composite_op(
    config: TrainConfig,
    flags: list[str],
    stays: str,
    tmp_path: Path,
    capsys: Said,
    no_report: None,
) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(config.as_dict()))
    assert main(["train", str(recipe), "--output", str(tmp_path / "other"), *flags]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "composite" in line]
    assert said == ([f"without composite ops: {stays}"] if stays else [])


def test_compiled_training(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = train(config)
    compile_as = functools.partial(torch.compile, backend="aot_eager")  # Inductor takes minutes
    monkeypatch.setattr("vision_ttt.engine.step.torch.compile", compile_as)
    compiled = train(change(config, {"compile": True, "output": str(tmp_path / "compiled")}))
    _check_same_training(eager, compiled, 1e-4)
