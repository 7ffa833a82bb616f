"""timm's folder: what another program gets from it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch

from vision_ttt.errors import DamagedModel
from vision_ttt.export import export_timm


def test_timm_loads_it_in_both_ways(make_model: Callable, tmp_path: Path) -> None:
    model, metadata = make_model(global_pool="middle")
    folder = tmp_path / "exported"
    assert export_timm(model, metadata, folder).difference == 0
    images = torch.randn(2, 3, 20, 20)
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert torch.equal(loaded(images), model(images))
    assert tuple(loaded.pretrained_cfg["mean"]) == model.pretrained_cfg["mean"]
    assert loaded.pretrained_cfg["label_names"] == ["cat", "dog", "émeu"]
    overlay = {"file": str(folder / "model.safetensors"), "num_classes": 3}
    loaded = timm.create_model(
        metadata.model, pretrained=True, pretrained_cfg_overlay=overlay, **metadata.model_args
    ).eval()
    assert torch.equal(loaded(images), model(images))


def test_null_is_the_models_default_there_too(make_model: Callable, tmp_path: Path) -> None:
    model, metadata = make_model()
    metadata.model_args["mini_batch_size"] = None
    export_timm(model, metadata, tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert "mini_batch_size" not in config["model_args"]


def test_weights_that_are_not_finite_are_not_written(make_model: Callable, tmp_path: Path) -> None:
    model, metadata = make_model()
    torch.nn.init.constant_(model.head.bias, torch.nan)
    with pytest.raises(DamagedModel, match=r"predicts NaN .*; nothing was written"):
        export_timm(model, metadata, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_the_config_tells_the_checkpoints_own_preparation(
    make_model: Callable, tmp_path: Path
) -> None:
    model, metadata = make_model("resnet18")
    metadata.carried["input"]["mean"] = (0.1, 0.2, 0.3)
    export_timm(model, metadata, tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["architecture"] == "resnet18"
    assert config["pretrained_cfg"]["mean"] == [0.1, 0.2, 0.3]
    assert config["pretrained_cfg"]["num_classes"] == config["num_classes"] == 3
