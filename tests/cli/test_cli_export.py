"""export, from the command line's end; ONNX is in tests/export."""

from pathlib import Path

import pytest
import timm
import torch

from described_models import describe_classifier
from vision_ttt import extras
from vision_ttt.cli.main import main
from vision_ttt.engine.building import build_model
from vision_ttt.engine.checkpoint import save_weights
from vision_ttt.tasks.images.models import data_config

Said = pytest.CaptureFixture[str]


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    arguments = {"num_classes": 2, "depth": 1, "embed_dim": 32, "num_heads": 1, "img_size": 16}
    model = build_model("vittt_nano_patch4_32", arguments)
    metadata = describe_classifier(
        "vittt_nano_patch4_32", arguments, ("a", "b"), data_config(model, 16)
    )
    path = tmp_path / "last.safetensors"
    save_weights(path, model.state_dict(), metadata)
    return str(path)


def test_timm_folder_and_program(checkpoint: str, tmp_path: Path, capsys: Said) -> None:
    folder = tmp_path / "exported"
    assert main(["export", checkpoint, str(folder)]) == 0
    assert "1 × 3 × 16 × 16" in capsys.readouterr().out
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert main(["export", checkpoint, str(tmp_path / "model.pt2")]) == 0
    assert "largest difference" in capsys.readouterr().out
    program = torch.export.load(tmp_path / "model.pt2").module()
    images = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(program(images), model(images), rtol=0, atol=1e-5)
    assert main(["export", checkpoint, str(folder)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["export", checkpoint, str(folder), "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("output", "flags", "told"),
    [
        ("model.pth", [], "must be a .onnx or .pt2 file"),
        ("no/such/model.pt2", [], "does not exist"),
        ("model.onnx", ["--portable"], "--portable is for a .pt2 file"),
        ("model.pt2", ["--kernels"], "--kernels is for a .onnx file or a .openvino folder"),
        ("model.onnx", ["--dtype", "bfloat16"], "--dtype bfloat16 is for --kernels"),
        ("folder", ["--dynamic_size"], "are for .onnx, .openvino and .pt2"),
        ("model.pt2", ["--batch_size", "0"], "--batch-size is 0"),
        ("last.safetensors", ["--overwrite"], "must be a .onnx or .pt2 file"),
    ],
)
def test_wrong_arguments(
    checkpoint: str, tmp_path: Path, output: str, flags: list[str], told: str, capsys: Said
) -> None:
    assert main(["export", checkpoint, str(tmp_path / output), *flags]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert len(said.splitlines()) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["last.safetensors"]


def test_missing_packages_are_one_line(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "onnx" else name)
    assert main(["export", checkpoint, str(tmp_path / "model.onnx")]) == 2
    said = capsys.readouterr().err
    assert "ONNX needs onnx: pip install 'vision-ttt[export]'" in said
    assert len(said.splitlines()) == 1
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "openvino" else name)
    assert main(["export", checkpoint, str(tmp_path / "model.openvino"), "--kernels"]) == 2
    said = capsys.readouterr().err
    assert "OpenVINO needs openvino: pip install 'vision-ttt[bench]'" in said
    assert not (tmp_path / "model.openvino").exists()
