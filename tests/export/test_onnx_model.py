"""ONNX files, run by onnxruntime."""

import json
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch

from vision_ttt.cli.main import main
from vision_ttt.engine.checkpoint import save_weights


def test_any_image_size_from_the_command_line(
    make_model: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, metadata = make_model(dynamic_img_size=True)
    save_weights(tmp_path / "last.safetensors", model.state_dict(), metadata)
    path = tmp_path / "model.onnx"
    assert main(["export", str(tmp_path / "last.safetensors"), str(path), "--dynamic_size"]) == 0
    assert "largest difference" in capsys.readouterr().out

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (images,), (logits,) = session.get_inputs(), session.get_outputs()
    assert (images.name, images.shape) == ("images", ["batch", 3, "height", "width"])
    assert (logits.name, logits.shape) == ("logits", ["batch", 3])
    told = session.get_modelmeta().custom_metadata_map
    assert json.loads(told["classes"]) == ["cat", "dog", "émeu"]
    assert json.loads(told["input"])["input_size"] == [3, 20, 20]
    for shape in ((1, 3, 20, 20), (3, 3, 8, 36), (2, 3, 64, 24)):
        x = torch.randn(shape)
        (got,) = session.run(None, {"images": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), model(x).detach(), rtol=0, atol=1e-5)


def test_fixed_sizes(make_model: Callable, tmp_path: Path) -> None:
    model, metadata = make_model()
    save_weights(tmp_path / "last.safetensors", model.state_dict(), metadata)
    path = tmp_path / "model.onnx"
    command = ["export", str(tmp_path / "last.safetensors"), str(path), "--batch_size", "2"]
    assert main(command) == 0
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == [2, 3, 20, 20]
    x = torch.randn(2, 3, 20, 20)
    (got,) = session.run(None, {"images": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), model(x).detach(), rtol=0, atol=1e-5)
