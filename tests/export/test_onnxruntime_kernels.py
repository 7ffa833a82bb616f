"""ONNX files whose blocks run by our kernels in ONNX Runtime.

`make onnxruntime` builds the library, without which these tests are skipped.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from vision_ttt import for_inference
from vision_ttt.export import InputShapes, export_onnx, onnxruntime_library
from vision_ttt.export.extensions import LIBRARIES
from vision_ttt.extras import MissingPackageError

onnxruntime = pytest.importorskip("onnxruntime")
needs_library = pytest.mark.skipif(
    not LIBRARIES["onnxruntime"][0].exists(), reason="the library is not built: make onnxruntime"
)
VITTT = {"embed_dim": 48, "num_heads": 3}  # whose hidden layers are whole vectors
BLOCKS = {"depth": 2, "embed_dim": 32, "patch_size": 8, "img_size": 32}


def session_of(content: Path | bytes, threads: str | None = None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    if threads is not None:
        options.add_session_config_entry("vision_ttt.threads", threads)
    options.register_custom_ops_library(str(onnxruntime_library()))
    content = content if isinstance(content, bytes) else content.read_bytes()
    return onnxruntime.InferenceSession(content, options)


def logits(session: onnxruntime.InferenceSession, images: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


@pytest.fixture(scope="module")
def exported(make_model: Callable, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """A model of two blocks for images of any size, and its file."""
    model, metadata = make_model(**VITTT, depth=2, dynamic_img_size=True)
    path = tmp_path_factory.mktemp("exported") / "small.onnx"
    shapes = InputShapes.of(model, (3, 20, 20), dynamic_size=True)
    assert export_onnx(model, metadata, path, shapes, kernels=True).difference < 1e-5
    return model, path


@needs_library
def test_images_of_any_size_from_several_threads(exported: tuple) -> None:
    model, path = exported
    session = session_of(path)
    images = [torch.randn(1 + i % 3, 3, 96 + 4 * (i % 5), 80) for i in range(20)]
    with torch.inference_mode():
        wanted = [model(x) for x in images]
    with ThreadPoolExecutor(4) as threads:
        for got, each in zip(
            threads.map(lambda x: logits(session, x), images), wanted, strict=True
        ):
            torch.testing.assert_close(got, each, rtol=0, atol=1e-5)


@needs_library
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit3_tiny_patch16_224", {**BLOCKS, "num_heads": 1}),  # with rotations
        ("mambar_tiny_patch16_224", BLOCKS),
    ],
)
def test_each_familys_blocks_in_both_dtypes(
    make_model: Callable, tmp_path: Path, name: str, options: dict
) -> None:
    model, metadata = make_model(name, **options)
    shapes, path = InputShapes.of(model, (3, 32, 32)), tmp_path / "model.onnx"
    assert export_onnx(model, metadata, path, shapes, kernels=True).difference < 1e-5
    dtype = torch.bfloat16
    found = export_onnx(model, metadata, path, shapes, kernels=True, dtype=dtype)
    assert 1e-4 < found.difference < 0.05
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        wanted = for_inference(model, dtype=dtype)(images)
    got = logits(session_of(path), images)
    assert (got - wanted).abs().max() < 0.02 * wanted.abs().max()


THREADS = """
import os, sys
import numpy as np, onnxruntime

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.add_session_config_entry("vision_ttt.threads", sys.argv[3])
options.register_custom_ops_library(sys.argv[1])
session = onnxruntime.InferenceSession(sys.argv[2], options)
before = {*os.listdir("/proc/self/task")}
session.run(None, {"images": np.zeros((1, 3, 64, 64), np.float32)})
print(len({*os.listdir("/proc/self/task")} - before))
del session, options  # whose library stays, as its threads do
"""


@needs_library
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux has them")
@pytest.mark.parametrize(("threads", "started"), [("1", "0\n"), ("2", "1\n")])
def test_kernels_have_the_threads_of_the_session_option(
    exported: tuple, threads: str, started: str
) -> None:
    """A process's own: threads that a kernel has started stay."""
    command = [sys.executable, "-c", THREADS, onnxruntime_library(), exported[1], threads]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == started


@needs_library
@pytest.mark.parametrize("threads", ["0", "-1", "two", "99999", ""])
def test_another_number_of_threads_is_refused(threads: str) -> None:
    told = f"vision_ttt.threads must be a number of threads, not '{threads}'"
    with pytest.raises(Exception, match=re.escape(told)):
        session_of(b"", threads)


@needs_library
def test_what_is_damaged_or_of_another_version_is_refused(exported: tuple) -> None:
    content = onnx.load(exported[1])
    (node,) = (node for node in content.graph.node if node.domain == "vision_ttt")
    (weights,) = (x for x in content.graph.initializer if x.name == node.input[1])
    numbers = onnx.numpy_helper.to_array(weights)
    weights.CopyFrom(onnx.numpy_helper.from_array(numbers[:, :-1_000], weights.name))
    with pytest.raises(Exception, match="the model's weights are incomplete"):
        session_of(content.SerializeToString())
    del node.attribute[1].ints[-1]
    with pytest.raises(Exception, match=r"PackedVitttBlock has .* bytes, here it has .*again"):
        session_of(content.SerializeToString())


@needs_library
def test_a_grid_that_the_tokens_do_not_fill_is_refused(exported: tuple) -> None:
    content = onnx.load(exported[1])
    (node,) = (node for node in content.graph.node if node.domain == "vision_ttt")
    grid = onnx.numpy_helper.from_array(np.array([3, 3], np.int32), "grid")
    content.graph.initializer.append(grid)
    node.input[3] = "grid"
    session = session_of(content.SerializeToString())
    with pytest.raises(Exception, match="25 tokens do not fill 3 x 3"):
        logits(session, torch.randn(1, 3, 20, 20))


def test_missing_libraries_are_told_with_their_commands(
    make_model: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in LIBRARIES:
        monkeypatch.setitem(LIBRARIES, name, (Path(f"/nowhere/_{name}.so"), "it"))
    with pytest.raises(MissingPackageError, match=r"make -C csrc/runtimes onnxruntime PYTHON="):
        onnxruntime_library()
    model, metadata = make_model(**VITTT)
    shapes, path = InputShapes.of(model, (3, 20, 20), batch_size=1), tmp_path / "model.onnx"
    with pytest.raises(MissingPackageError, match=r"_openvino\.so and _onnxruntime\.so are not"):
        export_onnx(model, metadata, path, shapes, kernels=True)
    assert not path.exists()
