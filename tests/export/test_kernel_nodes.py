"""The nodes of packed blocks hold what the kernels read, on every processor."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from onnx.numpy_helper import to_array
from torch import Tensor, nn

from vision_ttt import for_inference
from vision_ttt.export import InputShapes, kernel_nodes
from vision_ttt.export.kernel_nodes import _BLOCKS, _POINTER
from vision_ttt.export.onnx_model import translate
from vision_ttt.ops import _native
from vision_ttt.ops.packed import weights as packed_weights

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
    _, block = _BLOCKS[kernel.decode()]
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


def test_nodes_in_bfloat16_compute_what_for_inference_does(make_model: Callable) -> None:
    model, _ = make_model(depth=2, embed_dim=48, num_heads=3)
    shapes, dtype = InputShapes(3, 20, 20, batch_size=2), torch.bfloat16
    translated = translate(model, shapes, kernels=True, dtype=dtype)
    ((node, filled),) = nodes_of(translated.model_proto)
    y = torch.randn(2, 25, 48)
    got = run_node(node, *filled, y)
    assert got.equal(run_blocks(for_inference(model, dtype=dtype).model, y))
    assert not got.equal(run_blocks(for_inference(model).model, y))
