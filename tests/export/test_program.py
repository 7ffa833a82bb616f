"""Programs of torch.export: written, loaded, run at sizes that were not traced."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from vision_ttt import for_training, to_plain
from vision_ttt.export import ExportError, InputShapes, accepting_any_size, export_program
from vision_ttt.export.program import METADATA_FILE, plain_program
from vision_ttt.export.verification import verify

LOAD_ALONE = """
import sys, torch
sys.modules["vision_ttt"] = None  # importing it would fail
images, logits = torch.load(sys.argv[2])
got = torch.export.load(sys.argv[1]).module()(images)
assert (got - logits).abs().max() < 1e-5, (got, logits)
"""

LOAD_WITH_OPS = """
import sys, torch
path, case, module = sys.argv[1:]
if module:
    __import__(module)
images, logits = torch.load(case)
if path.endswith("program.pt2"):
    loaded = torch.export.load(path).module()
else:
    loaded = torch._inductor.aoti_load_package(path)
got = loaded(images)
assert (got - logits).abs().max() < 1e-5, (got, logits)
"""


@pytest.mark.parametrize(
    ("portable", "inner_model"),
    [
        (False, "linear"),
        pytest.param(True, "linear", marks=pytest.mark.slow),
        pytest.param(True, "mlp", marks=pytest.mark.slow),
    ],
)
def test_any_image_size(
    make_model: Callable, tmp_path: Path, portable: bool, inner_model: str
) -> None:
    model, metadata = make_model(global_pool="double", inner_model=inner_model)
    model = accepting_any_size(model, metadata)
    shapes = InputShapes.of(model, metadata.carried["input"]["input_size"], dynamic_size=True)
    path = tmp_path / "model.pt2"
    agreement = export_program(model, metadata, path, shapes, portable=portable)
    assert agreement.difference < 1e-5
    assert (1, 3, 20, 20) in agreement.shapes

    extra = {METADATA_FILE: ""}
    program = torch.export.load(path, extra_files=extra).module()
    assert json.loads(extra[METADATA_FILE])["carried"]["classes"] == ["cat", "dog", "émeu"]
    for size in ((20, 20), (20, 44), (8, 12)):  # the model's own size among them
        images = torch.randn(3, 3, *size)
        torch.testing.assert_close(program(images), model(images), rtol=0, atol=1e-5)
    with pytest.raises(AssertionError):  # not whole patches
        program(torch.randn(1, 3, 22, 20))


# A portable program is an ONNX file's, which is tested at any size.
@pytest.mark.parametrize("portable", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["vim_tiny_patch16_224", "mambar_tiny_patch16_224"])
def test_selective_scans_at_any_image_size(
    make_model: Callable, tmp_path: Path, name: str, portable: bool
) -> None:
    """Also with fewer patches than the registers of Mamba-Reg."""
    model, metadata = make_model(name, depth=1, embed_dim=32, patch_size=8, img_size=32)
    model = accepting_any_size(model, metadata)
    shapes = InputShapes.of(model, metadata.carried["input"]["input_size"], dynamic_size=True)
    path = tmp_path / "model.pt2"
    agreement = export_program(model, metadata, path, shapes, portable=portable)
    assert agreement.difference < 1e-5
    assert (3, 3, 16, 16) in agreement.shapes
    loaded = torch.export.load(path)
    assert ("higher_order.scan" in loaded.graph_module.code) is portable
    assert len(loaded.graph.nodes) < 400
    for size in ((32, 32), (24, 72), (16, 24)):  # the model's own size among them
        images = torch.randn(2, 3, *size)
        torch.testing.assert_close(loaded.module()(images), model(images), rtol=0, atol=1e-5)


def test_a_size_that_is_no_multiple_has_no_dynamic_sizes(make_model: Callable) -> None:
    model, _ = make_model(img_size=8, dynamic_img_size=True)
    with pytest.raises(ExportError, match=r"10 × 8, is no multiple of 4 pixels"):
        InputShapes.of(model, (3, 10, 8), dynamic_size=True)


@pytest.mark.slow
def test_images_of_less_than_a_mini_batch_of_tokens_grow(make_model: Callable) -> None:
    """A model whose own images have 4 tokens, and images of 16, of 20 and of 81."""
    model, _ = make_model(img_size=8, dynamic_img_size=True)
    shapes = InputShapes.of(model, (3, 8, 8), dynamic_size=True)
    program = plain_program(model, shapes).module()
    sizes = [(2, 3, *size) for size in ((8, 8), (16, 16), (16, 20), (36, 36))]
    verify(program, model, sizes, "program", tolerance=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("vittt_nano_patch4_32", {}, marks=pytest.mark.slow),
        ("vim_tiny_patch16_224", {"patch_size": 8, "img_size": 32}),
        pytest.param(
            *("vit3_tiny_patch16_224", {"patch_size": 8, "img_size": 32, "num_heads": 1}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_any_batch_after_a_fixed_one(
    make_model: Callable, name: str, options: dict[str, object]
) -> None:
    """No group of a convolution depends on the batch, for which ONNX has no attribute."""
    model, metadata = make_model(name, depth=1, embed_dim=32, **options)
    size = metadata.carried["input"]["input_size"]
    plain_program(model, InputShapes.of(model, size, batch_size=2))
    shapes = InputShapes.of(model, size)
    program = plain_program(model, shapes)
    verify(program.module(), model, shapes.to_verify(), name, tolerance=1e-5)
    convolutions = [node for node in program.graph.nodes if "conv" in str(node.target)]
    assert convolutions
    options = [option for node in convolutions for option in node.args[3:]]
    assert not any(isinstance(option, torch.fx.Node) for option in options)


def test_a_model_for_training(make_model: Callable, tmp_path: Path) -> None:
    model, metadata = make_model()
    for_training(model, strict=True)
    shapes = InputShapes.of(model, metadata.carried["input"]["input_size"])
    path = tmp_path / "model.pt2"
    assert export_program(model, metadata, path, shapes).difference < 1e-5
    graphs = [torch.export.load(path).graph]
    export_program(to_plain(model), metadata, path, shapes)
    graphs.append(torch.export.load(path).graph)
    first, second = ([str(node.target) for node in graph.nodes] for graph in graphs)
    assert first == second


@pytest.mark.slow
def test_a_portable_program_needs_no_vision_ttt(make_model: Callable, tmp_path: Path) -> None:
    model, metadata = make_model()
    shapes = InputShapes.of(model, metadata.carried["input"]["input_size"])
    path, case = tmp_path / "model.pt2", tmp_path / "case.pt"
    assert export_program(model, metadata, path, shapes, portable=True).difference < 1e-5
    images = torch.randn(5, 3, 20, 20)
    torch.save((images, model(images).detach()), case)
    command = [sys.executable, "-c", LOAD_ALONE, str(path), str(case)]
    subprocess.run(command, check=True, timeout=120)


@pytest.mark.slow
def test_programs_with_kernels_need_the_ops_and_no_more(
    make_model: Callable, tmp_path: Path
) -> None:
    """And PyTorch names them where they are missing; the package is AOTInductor's."""
    model, metadata = make_model()
    shapes = InputShapes.of(model, metadata.carried["input"]["input_size"])
    case, program, package = (tmp_path / name for name in ("case.pt", "program.pt2", "package.pt2"))
    export_program(model, metadata, program, shapes)
    images = torch.randn(2, 3, 20, 20)
    torch.save((images, model(images).detach()), case)
    loaded = torch.export.load(program)
    torch._inductor.aoti_compile_and_package(loaded, package_path=str(package))
    for path in (program, package):
        for module in ("vision_ttt.ops", ""):
            command = [sys.executable, "-c", LOAD_WITH_OPS, str(path), str(case), module]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert (done.returncode == 0) == bool(module), done.stderr
            assert module or "vision_ttt" in done.stderr


def test_a_fixed_batch_is_fixed(make_model: Callable, tmp_path: Path) -> None:
    model, metadata = make_model()
    shapes = InputShapes.of(model, metadata.carried["input"]["input_size"], batch_size=2)
    agreement = export_program(model, metadata, tmp_path / "model.pt2", shapes)
    assert agreement.shapes == ((2, 3, 20, 20),)
    program = torch.export.load(tmp_path / "model.pt2").module()
    with pytest.raises(AssertionError):
        program(torch.randn(3, 3, 20, 20))


def test_what_computes_something_else_is_not_written(
    make_model: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, metadata = make_model()
    other, _ = make_model()
    with torch.no_grad():
        other.head.bias += 0.01
    content = io.BytesIO()
    shapes = InputShapes.of(model, metadata.carried["input"]["input_size"])
    torch.export.save(plain_program(other, shapes), content)
    monkeypatch.setattr(torch.export, "save", lambda _, f, **__: f.write(content.getvalue()))
    with pytest.raises(ExportError, match="differs from the model by"):
        export_program(model, metadata, tmp_path / "model.pt2", shapes)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_loaded_again_is_one_line(
    make_model: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, metadata = make_model()
    shapes = InputShapes.of(model, metadata.carried["input"]["input_size"])
    monkeypatch.setattr(torch.export, "save", lambda _, f, **__: f.write(b"no program"))
    with pytest.raises(ExportError, match=r"torch\.export cannot load model\.pt2, which it has"):
        export_program(model, metadata, tmp_path / "model.pt2", shapes)
    assert list(tmp_path.iterdir()) == []


def test_verification_notices_nan_shape_and_failure() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ExportError, match="differs"):
        verify(lambda x: model(x) * float("nan"), model, [(1, 2)], "it")
    with pytest.raises(ExportError, match=r"returns \[1, 1\]"):
        verify(lambda x: model(x)[:, :1], model, [(1, 2)], "it")
    with pytest.raises(ExportError, match=r"it fails on images \[1, 2\]: .*mat1 and mat2"):
        verify(lambda x: model(x[:, :1]), model, [(1, 2)], "it")

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    with pytest.raises(ExportError, match=r"it fails on images \[1, 2\]: AssertionError; nothing"):
        verify(fail, model, [(1, 2)], "it")


def test_models_of_one_size_are_refused(make_model: Callable) -> None:
    model, metadata = make_model("mixer_s32_224")
    with pytest.raises(ExportError, match="mixer_s32_224 supports images of one size only"):
        accepting_any_size(model, metadata)


def test_ops_without_decomposition_are_named(
    make_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, metadata = make_model()
    monkeypatch.setattr("vision_ttt.export.program.decompositions", dict)
    with pytest.raises(ExportError, match=r"holds vision_ttt\.ttt_linear\.default"):
        plain_program(model, InputShapes.of(model, metadata.carried["input"]["input_size"]))


def test_models_that_cannot_be_traced_are_one_line() -> None:
    class Deciding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(ExportError, match="Deciding cannot be traced") as raised:
        plain_program(Deciding(), InputShapes(3, 8, 8))
    assert len(str(raised.value).splitlines()) == 1
