"""bfloat16 trains as float32 does: on real digits, on long sequences, at inner rates up to 4."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

from vision_ttt.engine import train
from vision_ttt.layers import TTTLinear
from vision_ttt.recipes import resolve

Fields = Callable[..., dict]


def _gratings(root: Path, size: int) -> Path:
    """Noisy gratings [size, size] in four directions: what they are shows in no single patch."""
    generator = np.random.default_rng(0)
    rows, columns = np.mgrid[:size, :size]
    for split, count in (("train", 40), ("val", 8)):
        for label in range(4):
            folder = root / split / f"direction-{label}"
            folder.mkdir(parents=True)
            along = np.cos(label * np.pi / 4) * columns + np.sin(label * np.pi / 4) * rows
            for index in range(count):
                wave = np.sin(2 * np.pi * (along / 12 + generator.random()))
                pixels = 128 + 60 * wave + generator.normal(0, 25, (size, size))
                grey = np.clip(pixels, 0, 255).astype(np.uint8)
                Image.fromarray(grey).save(folder / f"{index}.png")
    return root


def _losses(fields: dict, tmp_path: Path) -> list[float]:
    """The mean training loss of the last quarter of the run in each precision."""
    rows = []
    for precision in ("float32", "bfloat16"):
        config = resolve({**fields, "precision": precision, "output": str(tmp_path / precision)})
        rows.append(train(config).metrics["history"])
    assert all(last["train_loss"] < 0.9 * first["train_loss"] for first, *_, last in rows)
    return [row[-1]["train_loss"] for row in rows]


@pytest.mark.slow
def test_200_updates_on_digits(tmp_path: Path) -> None:
    fields = {
        "task": "classification",
        "dataset": "digits",
        "arguments": {"depth": 2},
        "epochs": 10,
        "batch_size": 64,  # 20 updates an epoch
        "learning_rate": 2e-3,
        "warmup": 1,
        "horizontal_flip": 0.0,
        "crop_scale": 0.7,
        "clip_norm": 1.0,
    }
    full, half = _losses(fields, tmp_path)
    assert half == pytest.approx(full, rel=0.02)


@pytest.mark.slow
def test_200_updates_on_1024_tokens(tmp_path: Path) -> None:
    fields = {
        "task": "classification",
        "dataset": str(_gratings(tmp_path / "gratings", 128)),
        "image_size": 128,  # patches of 4
        "arguments": {"depth": 1, "embed_dim": 64, "num_heads": 2},
        "epochs": 10,
        "batch_size": 8,  # 20 updates an epoch
        "learning_rate": 1e-3,
        "warmup": 1,
        "horizontal_flip": 0.0,
        "crop_scale": 0.9,
        "clip_norm": 1.0,
    }
    full, half = _losses(fields, tmp_path)
    assert half == pytest.approx(full, rel=0.02)


def _with_rate(model: nn.Module, rate: float) -> nn.Module:
    for module in model.modules():
        if isinstance(module, TTTLinear):
            module.base_learning_rate = rate
    return model


@pytest.mark.parametrize(
    "rate", [4.0, *(pytest.param(rate, marks=pytest.mark.slow) for rate in (1.0, 2.0))]
)
def test_no_nan_at_large_inner_rates(
    rate: float, tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vision_ttt.engine import task

    original = task.build_model
    monkeypatch.setattr(task, "build_model", lambda *a: _with_rate(original(*a), rate))
    config = tiny_fields(precision="bfloat16", epochs=6, learning_rate=5e-3, arguments={"depth": 2})
    result = train(resolve(config))
    model = result.model
    assert {m.base_learning_rate for m in model.modules() if isinstance(m, TTTLinear)} == {rate}
    assert result.metrics["skipped_updates"] == []
    assert result.metrics["history"][-1]["train_loss"] < result.metrics["history"][0]["train_loss"]


@pytest.mark.parametrize("rate", [1.0, 4.0])
@pytest.mark.parametrize("image_size", [32, 128])
def test_activations_a_hundred_times_as_large(rate: float, image_size: int) -> None:
    torch.manual_seed(0)
    model = timm.create_model("vittt_nano_patch4_32", num_classes=4, depth=2, img_size=image_size)
    _with_rate(model, rate)
    handles = [
        module.register_forward_pre_hook(lambda _m, inputs: (100 * inputs[0], *inputs[1:]))
        for module in model.modules()
        if isinstance(module, TTTLinear)
    ]
    assert handles
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    images = torch.randn(2, 3, image_size, image_size)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(images)
        loss = nn.functional.cross_entropy(logits.float(), torch.tensor([0, 3]))
        loss.backward()
        assert torch.isfinite(loss)
        for name, weight in model.named_parameters():
            assert torch.isfinite(weight.grad).all(), name
        optimizer.step()
        optimizer.zero_grad()
