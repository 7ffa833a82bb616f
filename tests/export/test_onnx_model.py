"""ONNX files, run by onnxruntime."""

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch.export import Dim

from vision_ttt.cli.main import main
from vision_ttt.engine.checkpoint import save_weights
from vision_ttt.export import InputShapes, export_onnx


@pytest.mark.slow
def test_any_image_size_from_the_command_line(
    make_model: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, metadata = make_model(dynamic_img_size=True)
    save_weights(tmp_path / "last.safetensors", model.state_dict(), metadata)
    path = tmp_path / "model.onnx"
    assert main(["export", str(tmp_path / "last.safetensors"), str(path), "--dynamic_size"]) == 0
    assert "largest difference" in capsys.readouterr().out

    (loop,) = (node for node in onnx.load(path).graph.node if node.op_type == "Scan")
    (step,) = (attribute.g for attribute in loop.attribute if attribute.name == "body")
    assert len(step.node) <= 22  # a runtime pays for each, at every step

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


@pytest.mark.slow  # the exporter's cases below have both families
@pytest.mark.parametrize("name", ["vim_tiny_patch16_224", "mambar_tiny_patch16_224"])
def test_selective_scans_at_any_image_size(make_model: Callable, tmp_path: Path, name: str) -> None:
    """The loop is one node per block, and large and small steps are exact in onnxruntime, too."""
    model, metadata = make_model(
        name, depth=1, embed_dim=32, patch_size=8, img_size=32, dynamic_img_size=True
    )
    with torch.no_grad():
        model.blocks[0].mixer.dt_bias[::2] = 100  # e¹⁰⁰ is no float32
        model.blocks[0].mixer.dt_bias[1::4] = -20  # ln(1 + e⁻²⁰) is not 0
    shapes = InputShapes.of(model, (3, 32, 32), dynamic_size=True)
    path = tmp_path / "model.onnx"
    assert export_onnx(model, metadata, path, shapes).difference < 1e-5
    nodes = [node.op_type for node in onnx.load(path).graph.node]
    assert nodes.count("Scan") == 1
    assert len(nodes) < 300

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for shape in ((2, 3, 24, 72), (1, 3, 16, 24)):
        x = torch.randn(shape)
        (got,) = session.run(None, {"images": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), model(x).detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("inner", ["swiglu", pytest.param("vit3", marks=pytest.mark.slow)])
def test_a_linear_vit_at_any_image_size(make_model: Callable, tmp_path: Path, inner: str) -> None:
    sizes = {"depth": 1, "embed_dim": 32, "num_heads": 2, "patch_size": 8, "img_size": 32}
    base = {"base": "deit_tiny_patch16_224", "inner": inner}
    model, metadata = make_model("linear_vit", **base, **sizes)
    shapes = InputShapes.of(model, (3, 32, 32), dynamic_size=True)
    path = tmp_path / "model.onnx"
    assert export_onnx(model, metadata, path, shapes).difference < 1e-5
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    x = torch.randn(3, 3, 24, 72)
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


PLAIN = {"depth": 1, "embed_dim": 32, "num_heads": 1, "patch_size": 8, "img_size": 32}
SCANS = {"depth": 1, "embed_dim": 32, "patch_size": 8, "img_size": 32}
STAGE = {"dims": (16,), "depths": (1,), "num_heads": (1,), "img_size": 32}
DENOISER = {"hidden_size": 32, "depth": 1, "num_heads": 1, "img_size": 32, "in_chans": 3}
ANY = {"dynamic_img_size": True}
slow = pytest.mark.slow


def inputs(name: str, batch: int, height: int, width: int) -> tuple[torch.Tensor, ...]:
    """Images, and for a denoiser their times and classes."""
    images = torch.randn(batch, 3, height, width)
    if not name.startswith("dit3"):
        return (images,)
    return images, torch.rand(batch), torch.arange(batch) % 3


@pytest.mark.parametrize(
    ("name", "options", "multiple"),
    [
        pytest.param(
            *("vittt_nano_patch4_32", {**PLAIN, **ANY}, 8),
            marks=pytest.mark.skipif(
                torch.__version__.startswith("2.11."),
                reason="this exporter of PyTorch 2.11 keeps our ops; vision-ttt export does not",
            ),
        ),
        pytest.param("vit3_tiny_patch16_224", {**PLAIN, **ANY}, 8, marks=slow),
        pytest.param("hvit3_tiny", STAGE, 32, marks=slow),
        pytest.param("vim_tiny_patch16_224", {**SCANS, **ANY}, 8, marks=slow),
        pytest.param("mambar_tiny_patch16_224", {**SCANS, **ANY}, 8, marks=slow),
        pytest.param("dit3_nano_patch4_32", DENOISER, None, marks=slow),
        pytest.param("vittt_nano_patch4_32", {**PLAIN, "inner_model": "mlp"}, None, marks=slow),
    ],
)
def test_pytorchs_own_exporter_needs_no_help(
    make_model: Callable, name: str, options: dict[str, object], multiple: int | None
) -> None:
    """Of the model as it is, with its gradients and kernels: what comes out is ONNX alone.

    It accepts any batch, and with ``multiple`` any image size.
    """
    model, _ = make_model(name, **options)
    axes = {0: Dim("batch")}
    sizes = [(32, 32)]
    if multiple:
        axes |= {2: multiple * Dim("rows", min=2), 3: multiple * Dim("columns", min=2)}
        sizes = [(5 * multiple, 4 * multiple), (3 * multiple, 2 * multiple)]
    program = torch.onnx.export(
        model,
        inputs(name, 2, *sizes[0]),
        dynamo=True,
        verbose=False,
        dynamic_shapes=(axes, {0: axes[0]}, {0: axes[0]})[: len(inputs(name, 1, 32, 32))],
    )
    content = program.model_proto.SerializeToString()
    assert {node.domain for node in program.model_proto.graph.node} == {""}
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    for batch in (1, 3):
        for size in sizes:
            x = inputs(name, batch, *size)
            names = (entry.name for entry in session.get_inputs())
            (got,) = session.run(None, dict(zip(names, (y.numpy() for y in x), strict=True)))
            torch.testing.assert_close(torch.from_numpy(got), model(*x).detach(), rtol=0, atol=1e-5)
    kernels = torch.export.export(model, inputs(name, 2, *sizes[0])).graph_module.code
    assert "vision_ttt" in kernels  # and afterwards it is as before


def test_what_onnx_lacks_is_one_line_and_a_traceback_on_request(
    make_model: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, metadata = make_model()
    save_weights(tmp_path / "last.safetensors", model.state_dict(), metadata)

    def translate(*_: object, **__: object) -> None:
        try:
            raise TypeError("no attribute for it\nat all")
        except TypeError as error:
            raise RuntimeError("This is step 3/3\nof many") from error

    monkeypatch.setattr(torch.onnx, "export", translate)
    command = ["export", str(tmp_path / "last.safetensors"), str(tmp_path / "model.onnx")]
    assert main(command) == 2
    told = capsys.readouterr().err
    assert told == "error: Vittt cannot be translated to ONNX: no attribute for it\n"
    assert main([*command, "--traceback"]) == 2
    told = capsys.readouterr().err
    assert "RuntimeError: This is step 3/3" in told
    assert told.endswith("ONNX: no attribute for it\n")
    assert not (tmp_path / "model.onnx").exists()


def test_the_former_exporter_is_refused(make_model: Callable, tmp_path: Path) -> None:
    model, _ = make_model()
    with (
        pytest.warns(DeprecationWarning, match="TorchScript-based ONNX export"),
        pytest.raises(TypeError, match=r"dynamo=False\) cannot hold this model"),
    ):
        torch.onnx.export(
            model, (torch.zeros(1, 3, 20, 20),), tmp_path / "model.onnx", dynamo=False
        )
