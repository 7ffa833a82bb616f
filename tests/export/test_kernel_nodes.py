"""The nodes of packed blocks hold what the kernels read, and functions for those without them."""

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.numpy_helper import to_array
from torch import Tensor, nn

from vision_ttt import for_inference
from vision_ttt.export import InputShapes, kernel_nodes
from vision_ttt.export.kernel_nodes import _OPS, _POINTER
from vision_ttt.export.node_functions import _numbers
from vision_ttt.export.onnx_model import translate
from vision_ttt.export.translation import translated
from vision_ttt.ops import _native
from vision_ttt.ops.packed import weights as packed_weights

MLP = {"num_heads": 3, "embed_dim": 48, "inner_model": "mlp", "dynamic_img_size": True}
STAGES = {"dims": (16, 32), "depths": (1, 1), "num_heads": (1, 1), "img_size": 64}

pytestmark = pytest.mark.skipif(_native.LIBRARY is None, reason="the kernels are missing")


def nodes_of(model: onnx.ModelProto) -> list[tuple[onnx.NodeProto, list[np.ndarray]]]:
    """The nodes with their weights and structures."""
    constants = {x.name: to_array(x) for x in model.graph.initializer}
    ours = [node for node in model.graph.node if node.domain == kernel_nodes.DOMAIN]
    return [(node, [constants[name].copy() for name in node.input[1:3]]) for node in ours]


def run_node(
    node: onnx.NodeProto, weights: np.ndarray, structures: np.ndarray, y: Tensor
) -> Tensor:
    """What the extension does: addresses in the place of offsets, and a call's own numbers."""
    kernel, kinds = (onnx.helper.get_attribute_value(attribute) for attribute in node.attribute)
    block = _OPS[kernel.decode()].BLOCK
    words = np.ascontiguousarray(structures).view(np.int64).reshape(len(structures), -1)
    assert words.shape[1] == len(kinds)
    for column, kind in enumerate(kinds):
        if kind >= _POINTER:
            words[:, column] += np.where(words[:, column], weights.ctypes.data - 64, 0)
    problems = (block.structure * len(words)).from_buffer(words)
    out, between = torch.empty_like(y), torch.empty_like(y)
    for problem in problems:
        problem.batch, problem.length, problem.threads = *y.shape[:2], 1
        problem.height, problem.width = 5, 5
    first = problems[0]
    scratch = torch.empty(_native.call_kernel(f"vision_ttt_{block.name}_scratch", first))
    first.y, first.out, first.scratch = (x.data_ptr() for x in (y, out, scratch))
    if len(words) > 1:
        first.between = between.data_ptr()
    assert _native.call_kernel(f"vision_ttt_{block.name}", first) == 0
    return out


def test_nodes_compute_their_blocks_and_are_those_of_every_processor(
    make_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 weights are exact sums of the terms that kernels for tile registers take."""
    model, _ = make_model(depth=2, embed_dim=48, num_heads=3)
    found = []
    for each in ("avx512", "amx"):
        monkeypatch.setattr(packed_weights, "instruction_set", lambda each=each: each)
        translated = translate(model, InputShapes(3, 20, 20, batch_size=2), kernels=True)
        found += nodes_of(translated.model_proto)
    (node, filled), (_, others) = found
    assert all(np.array_equal(one, other) for one, other in zip(filled, others, strict=True))
    y = torch.randn(2, 25, 48)
    torch.testing.assert_close(run_node(node, *filled, y), run_blocks(model, y), rtol=0, atol=1e-4)


@torch.inference_mode()
def run_blocks(model: nn.Module, y: Tensor) -> Tensor:
    for block in model.blocks:
        y = block(y, (5, 5))
    return y


@pytest.mark.slow
def test_nodes_in_bfloat16_compute_what_for_inference_does(make_model: Callable) -> None:
    model, _ = make_model(depth=2, embed_dim=48, num_heads=3)
    shapes, dtype = InputShapes(3, 20, 20, batch_size=2), torch.bfloat16
    translated = translate(model, shapes, kernels=True, dtype=dtype, functions=True)
    ((node, filled),) = nodes_of(translated.model_proto)
    y = torch.randn(2, 25, 48)
    got = run_node(node, *filled, y)
    assert got.equal(run_blocks(for_inference(model, dtype=dtype).model, y))
    assert not got.equal(run_blocks(for_inference(model).model, y))
    images = torch.randn(2, 3, 20, 20)
    torch.testing.assert_close(
        without_library(translated.model_proto, images),
        for_inference(model, dtype=dtype)(images),
        rtol=0,
        atol=2e-3,
    )


def without_library(model: onnx.ModelProto, images: Tensor) -> Tensor:
    """The logits in a runtime that does not know the nodes."""
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            *("vittt_nano_patch4_32", {"num_heads": 3, "embed_dim": 48}), marks=pytest.mark.slow
        ),
        ("vit3_tiny_patch16_224", {"num_heads": 1}),  # with rotations
        pytest.param("mambar_tiny_patch16_224", {}, marks=pytest.mark.slow),
        pytest.param("vittt_nano_patch4_32", MLP, marks=pytest.mark.slow),
        pytest.param("hvit3_tiny", STAGES, marks=pytest.mark.slow),  # with blocks of four sizes
    ],
)
def test_a_runtime_without_the_kernels_computes_the_functions(
    make_model: Callable, name: str, options: dict
) -> None:
    """The blocks of all sizes have one, and the file holds the weights once."""
    if name != "hvit3_tiny":
        options = {"depth": 2, "embed_dim": 32, "patch_size": 8, "img_size": 32, **options}
    dynamic = "dynamic_img_size" in options
    model, _ = make_model(name, **options)
    shapes = InputShapes.of(model, (3, *[options["img_size"]] * 2), dynamic_size=dynamic)
    found = translate(model, shapes, kernels=True, functions=True).model_proto
    assert len(found.functions) == (4 if name == "hvit3_tiny" else 2)
    constants = [a.t for f in found.functions for node in f.node for a in node.attribute]
    assert 1024 <= max(len(constant.raw_data) for constant in constants) < 2048  # a table
    for size in (32, 48) if dynamic else (options["img_size"],):
        images = torch.randn(3, 3, size, size)
        with torch.inference_mode():
            wanted = model(images)
        torch.testing.assert_close(without_library(found, images), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_the_bits(dtype: torch.dtype) -> None:
    """Normal numbers, subnormal ones, zeros, and fractions that a division would round up."""
    limits = torch.finfo(dtype)
    ends = [0.0, -0.0, limits.max, limits.min, limits.tiny, -limits.tiny, limits.tiny / 4, 1.0]
    scales = 2.0 ** torch.arange(-500, 500).clamp(-126, 120)
    numbers = torch.cat([torch.tensor(ends), torch.randn(1000) * scales]).to(dtype)
    words = torch.cat([numbers.view(torch.int32), torch.arange(0x3FFF3F00, 0x3FFF4000)])
    words = words.int().view(2, -1)
    assert _numbers(words, dtype).view(torch.int32).equal(words)

    class Numbers(nn.Module):
        def forward(self, words: Tensor) -> Tensor:
            return _numbers(words, dtype).float()

    program = torch.export.export(Numbers(), (words,))
    model = translated(program, ["words"], ["numbers"], [{}]).model_proto
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (got,) = session.run(None, {"words": words.numpy()})
    assert torch.from_numpy(got).equal(words.view(dtype).float())  # but for the sign of a zero
