"""timm's folder: what another program gets from it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch

from vision_ttt.cli.main import main
from vision_ttt.engine import CheckpointError
from vision_ttt.errors import DamagedModel
from vision_ttt.export import export_timm
from vision_ttt.tasks import load_model


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


def test_it_is_read_as_a_checkpoint(make_model: Callable, tmp_path: Path) -> None:
    model, metadata = make_model(global_pool="middle")
    export_timm(model, metadata, tmp_path / "exported")
    loaded, described = load_model(tmp_path / "exported")
    images = torch.randn(2, 3, 20, 20)
    assert torch.equal(loaded(images), model(images))
    assert described.carried["classes"] == ["cat", "dog", "émeu"]
    for key in ("input_size", "mean", "std"):
        assert tuple(described.carried["input"][key]) == tuple(metadata.carried["input"][key])
    # What a checkpoint can do, a folder can, too.
    assert main(["export", str(tmp_path / "exported"), str(tmp_path / "again")]) == 0
    for name in ("config.json", "model.safetensors"):
        former, again = ((tmp_path / each / name).read_bytes() for each in ("exported", "again"))
        assert again == former


@pytest.mark.parametrize("name", ["resnet18", "test_vit", "vit3_nano_patch4_32"])
def test_what_timm_has_saved_is_read(
    name: str, image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model, folder = timm.create_model(name, num_classes=2).eval(), str(tmp_path / "saved")
    labels = {"label_names": ["dark", "light"]}
    timm.models.save_for_hf(model, folder, model_config=labels, safe_serialization=True)
    loaded, described = load_model(folder)
    images = torch.randn(1, *described.carried["input"]["input_size"])
    assert torch.equal(loaded(images), model(images))
    assert main(["predict", str(image_folder / "val"), "--checkpoint", folder]) == 0
    assert "light" in capsys.readouterr().out
    assert main(["eval", folder, "--dataset", str(image_folder)]) == 0
    assert "balanced" in capsys.readouterr().out
    assert main(["eval", folder]) == 2
    assert "dataset" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_classes": "3"}, "num_classes is '3', and no weight has that size"),
        ({"num_classes": 10**12}, "num_classes is 1000000000000, and no weight has that size"),
        ({"architecture": None}, "model must be a name"),
        ({"architecture": "no_such"}, "unknown model 'no_such'"),
        ({"model_args": {"no_such": 1}}, "no_such"),
        ({"label_names": [1, 2, 3]}, "classes"),
        ({"pretrained_cfg": {"mean": ["a"]}}, "mean"),
        ({"pretrained_cfg": {}}, "cannot take images of 224 × 224 pixels"),
    ],
)
def test_damaged_folders(make_model: Callable, tmp_path: Path, change: dict, told: str) -> None:
    model, metadata = make_model()
    export_timm(model, metadata, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=told):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match="describes no classifier of timm"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"no model\.safetensors; timm\.models\.save_for_hf wri"
    ):
        load_model(tmp_path)


def test_names_by_number(make_model: Callable, tmp_path: Path) -> None:
    model, metadata = make_model()
    export_timm(model, metadata, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["label_names"] = {"0": "cat", "2": "émeu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, described = load_model(tmp_path)
    assert described.carried["classes"] == ["cat", "1", "émeu"]
