"""OpenVINO's files, and models in it whose blocks run by our kernels.

`make openvino` builds the extension, without which these tests are skipped.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import timm
import torch
from PIL import Image

from vision_ttt import for_inference
from vision_ttt.export import (
    ExportError,
    InputShapes,
    export_onnx,
    export_openvino,
    openvino_extension,
    openvino_model,
)
from vision_ttt.export.extensions import LIBRARIES
from vision_ttt.extras import MissingPackageError

openvino = pytest.importorskip("openvino")
SOURCES = Path(__file__).parents[2] / "csrc" / "runtimes"
VITTT = {"embed_dim": 48, "num_heads": 3}  # whose hidden layers are whole vectors
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
slow = pytest.mark.slow
needs_extension = pytest.mark.skipif(
    not LIBRARIES["openvino"][0].exists(), reason="the extension is not built: make openvino"
)


@pytest.fixture(scope="module")
def exported(make_model: Callable, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """A model of two blocks for images of any size, OpenVINO with our extension, and its file."""
    model, metadata = make_model(**VITTT, depth=2, dynamic_img_size=True)
    folder = tmp_path_factory.mktemp("exported") / "small.openvino"
    shapes = InputShapes.of(model, (3, 20, 20), dynamic_size=True)
    assert export_openvino(model, metadata, folder, shapes, kernels=True).difference < 1e-5
    core = openvino_model.core_of(kernels=True)
    return model, core, folder / openvino_model.MODEL_FILE


def difference(run: Callable, model: torch.nn.Module, shape: tuple[int, ...]) -> float:
    """The largest difference of logits, relative to the largest."""
    images = torch.randn(shape)
    with torch.inference_mode():
        wanted, got = model(images), torch.from_numpy(run(images.numpy())[0])
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


BLOCKS = {"depth": 2, "embed_dim": 32, "patch_size": 8, "img_size": 32}
STAGES = {"dims": (16, 32), "depths": (1, 1), "num_heads": (1, 1), "img_size": 64}


@needs_extension
@pytest.mark.parametrize(
    ("name", "options", "nodes"),
    [
        ("vittt_nano_patch4_32", {**VITTT, "depth": 2, "design": "conv1d"}, 1),
        ("vit3_tiny_patch16_224", {**BLOCKS, "num_heads": 1, "dynamic_img_size": True}, 2),
        ("mambar_tiny_patch16_224", {**BLOCKS, "dynamic_img_size": True}, 2),
        pytest.param("hvit3_tiny", STAGES, 2, marks=slow),
        pytest.param("vittt_nano_patch4_32", {**VITTT, "inner_model": "mlp"}, 1, marks=slow),
        pytest.param("vim_tiny_patch16_224", {**BLOCKS, "dynamic_img_size": True}, 2, marks=slow),
    ],
)
def test_each_familys_blocks_are_nodes(
    make_model: Callable, tmp_path: Path, name: str, options: dict, nodes: int
) -> None:
    model, metadata = make_model(name, **options)
    size = (3, options.get("img_size", 20), options.get("img_size", 20))
    shapes = InputShapes.of(model, size, dynamic_size="dynamic_img_size" in options)
    folder = tmp_path / "model.openvino"
    assert export_openvino(model, metadata, folder, shapes, kernels=True).difference < 1e-5
    read = openvino_model.core_of(kernels=True).read_model(folder / openvino_model.MODEL_FILE)
    kinds = [operation.get_type_name() for operation in read.get_ops()]
    assert kinds.count("PackedBlocks") == nodes
    assert not {"TensorIterator", "Loop"} & {*kinds}
    assert json.loads(read.get_rt_info(["vision_ttt", "classes"]).value) == ["cat", "dog", "émeu"]


def test_a_model_without_kernels_needs_no_extension(make_model: Callable, tmp_path: Path) -> None:
    model, metadata = make_model()
    folder = tmp_path / "model.openvino"
    shapes = InputShapes.of(model, (3, 20, 20), batch_size=2)
    assert export_openvino(model, metadata, folder, shapes).difference < 1e-5
    compiled = openvino.Core().compile_model(folder / openvino_model.MODEL_FILE, "CPU", F32)
    assert difference(compiled, model, (2, 3, 20, 20)) < 1e-5


@needs_extension
def test_several_inferences_at_once_of_several_sizes(exported: tuple) -> None:
    model, core, path = exported
    settings = {**F32, "NUM_STREAMS": 2, "INFERENCE_NUM_THREADS": 2}
    queue = openvino.AsyncInferQueue(core.compile_model(path, "CPU", settings), 4)
    images = [torch.randn(1 + i % 3, 3, 96 + 4 * (i % 5), 80) for i in range(40)]
    with torch.inference_mode():
        wanted = [model(x) for x in images]
    got = {}
    queue.set_callback(lambda request, i: got.update({i: request.get_output_tensor(0).data.copy()}))
    for i, x in enumerate(images):
        queue.start_async([x.numpy()], i)
    queue.wait_all()
    for i, logits in enumerate(wanted):
        torch.testing.assert_close(torch.from_numpy(got[i]), logits, rtol=0, atol=1e-5)


PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
THREADS = """
import os, sys
import numpy as np, openvino

core = openvino.Core()
core.add_extension(sys.argv[1])
settings = {"INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1}
settings |= {"ENABLE_CPU_PINNING": True, "INFERENCE_NUM_THREADS": int(sys.argv[3])}
request = core.compile_model(sys.argv[2], "CPU", settings).create_infer_request()
images = [np.zeros((1, 3, 64, 64), np.float32)]

before = {*os.listdir("/proc/self/task")}
request.start_async(images)
request.wait()
for thread in {*os.listdir("/proc/self/task")} - before:
    print(sorted(os.sched_getaffinity(int(thread))) == sorted(os.sched_getaffinity(0)))
"""


@needs_extension
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux has them")
@pytest.mark.skipif(PROCESSORS < 2, reason="needs two processors")
@pytest.mark.parametrize(("threads", "started"), [("1", ""), ("2", "True\n")])
def test_kernels_have_the_runtimes_threads_on_all_processors(
    exported: tuple, threads: str, started: str
) -> None:
    """A process's own: threads that a stream has started stay. The stream itself is pinned."""
    _, _, path = exported
    command = [sys.executable, "-c", THREADS, openvino_extension(), path, threads]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == started


@needs_extension
def test_compiled_models_come_from_a_cache(exported: tuple, tmp_path: Path) -> None:
    model, core, path = exported
    settings = {**F32, "CACHE_DIR": str(tmp_path)}
    assert not core.compile_model(path, "CPU", settings).get_property("LOADED_FROM_CACHE")
    compiled = core.compile_model(path, "CPU", settings)
    assert compiled.get_property("LOADED_FROM_CACHE")
    assert difference(compiled, model, (2, 3, 24, 20)) < 1e-5


@needs_extension
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_runtime_in_half_precision(exported: tuple, dtype: str) -> None:
    """The parts around the blocks are rounded; the blocks get and give what the runtime has."""
    model, core, path = exported
    compiled = core.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": dtype})
    assert difference(compiled, model, (1, 3, 20, 20)) < 0.05


@needs_extension
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vittt_nano_patch4_32", {**VITTT, "depth": 2, "img_size": 20}),
        ("vit3_tiny_patch16_224", {**BLOCKS, "num_heads": 1}),
        pytest.param("vim_tiny_patch16_224", BLOCKS, marks=slow),
    ],
)
def test_blocks_in_bfloat16_are_those_of_for_inference(
    make_model: Callable, tmp_path: Path, name: str, options: dict
) -> None:
    """They are so beside parts in float32 and, as by default, beside parts in bfloat16."""
    model, metadata = make_model(name, **options)
    size, dtype = options["img_size"], torch.bfloat16
    folder = tmp_path / "model.openvino"
    shapes = InputShapes.of(model, (3, size, size))
    agreement = export_openvino(model, metadata, folder, shapes, kernels=True, dtype=dtype)
    assert 1e-4 < agreement.difference < 0.05
    core, packed = openvino_model.core_of(kernels=True), for_inference(model, dtype=dtype)
    for settings in (F32, {}):
        compiled = core.compile_model(folder / openvino_model.MODEL_FILE, "CPU", settings)
        assert difference(compiled, packed, (2, 3, size, size)) < 0.02


@needs_extension
def test_an_onnx_file_has_our_nodes_and_what_is_damaged_is_refused(
    make_model: Callable, tmp_path: Path
) -> None:
    model, metadata = make_model(**VITTT)
    path = tmp_path / "model.onnx"
    shapes = InputShapes.of(model, (3, 20, 20), batch_size=1)
    assert export_onnx(model, metadata, path, shapes, kernels=True).difference < 1e-5
    content = onnx.load(path)
    (node,) = (node for node in content.graph.node if node.domain == "vision_ttt")
    assert [attribute.name for attribute in node.attribute] == ["kernel", "kinds"]
    core = openvino_model.core_of(kernels=True)
    with pytest.raises(RuntimeError, match=r"No conversion rule .* vision_ttt\.PackedBlocks"):
        openvino.Core().read_model(path)

    (weights,) = (x for x in content.graph.initializer if x.name == node.input[1])
    numbers = onnx.numpy_helper.to_array(weights)
    weights.CopyFrom(onnx.numpy_helper.from_array(numbers[:, :-1_000], weights.name))
    run = openvino_model.loaded(core, content.SerializeToString(), "it")
    with pytest.raises(RuntimeError, match="the model's weights are incomplete"):
        run(torch.randn(1, 3, 20, 20))
    del node.attribute[1].ints[-1]
    with pytest.raises(
        ExportError, match=r"it: vision_ttt: .* PackedVitttBlock has .* bytes, here it has .*again"
    ):
        openvino_model.loaded(core, content.SerializeToString(), "it")


def test_a_dtype_without_kernels_is_refused(make_model: Callable) -> None:
    model, _ = make_model()
    shapes = InputShapes(3, 20, 20, batch_size=1)
    for kernels, dtype in ((False, torch.bfloat16), (True, torch.float16)):
        with pytest.raises(ExportError, match=f"dtype must be one of .*float32.* got {dtype}"):
            openvino_model.onnx_content(model, None, shapes, kernels=kernels, dtype=dtype)


def test_what_has_no_node_is_refused(make_model: Callable) -> None:
    shapes = InputShapes(3, 32, 32, batch_size=1)
    other = timm.create_model("test_vit", img_size=32).eval()
    with pytest.raises(ExportError, match="VisionTransformer has no block of Vittt"):
        openvino_model.onnx_content(other, None, shapes, kernels=True)
    arguments = {"base": "test_vit", "embed_dim": 64, "num_heads": 2, "img_size": 32}
    linear = timm.create_model("linear_vit", **arguments).eval()
    with pytest.raises(ExportError, match="do not support linearised ViTs"):
        openvino_model.onnx_content(linear, None, shapes, kernels=True)
    model, _ = make_model(**VITTT, img_size=32)
    model.blocks[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ExportError, match=r"the kernels do not support blocks\.0 .*hook"):
        openvino_model.onnx_content(model, None, shapes, kernels=True)


def test_a_missing_extension_is_told_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIBRARIES, "openvino", (Path("/nowhere/_openvino.so"), "it"))
    with pytest.raises(MissingPackageError, match=r"not built; .* make -C csrc/runtimes openvino"):
        openvino_model.core_of(kernels=True)


@slow
@needs_extension
def test_a_program_without_python_classifies_a_picture(exported: tuple, tmp_path: Path) -> None:
    model, _, path = exported
    example = tmp_path / "example"
    make = ["make", "-C", SOURCES, f"PYTHON={sys.executable}", f"EXAMPLE={example}", "example"]
    subprocess.run(make, check=True, capture_output=True)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 20, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.ppm")
    bare = {name: x for name, x in os.environ.items() if not name.startswith("PYTHON")}
    command = [example, openvino_extension(), path]
    done = subprocess.run(
        [*command, tmp_path / "image.ppm"], env=bare, capture_output=True, text=True, check=True
    )
    config = model.pretrained_cfg
    mean, std = (torch.tensor(config[name]).view(3, 1, 1) for name in ("mean", "std"))
    images = (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - mean) / std
    with torch.inference_mode():
        chances = dict(
            zip(("cat", "dog", "émeu"), model(images[None])[0].softmax(0).tolist(), strict=True)
        )
    told = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert [name for _, name in told] == sorted(chances, key=chances.get, reverse=True)
    assert all(abs(float(chance) - chances[name]) < 1e-3 for chance, name in told)
    failed = subprocess.run([*command, path], env=bare, capture_output=True, text=True)
    assert failed.returncode == 1
    assert "is no binary PPM of 8 bits" in failed.stderr
