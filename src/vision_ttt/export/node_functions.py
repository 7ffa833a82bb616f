"""What a node of packed blocks computes, in ONNX's own operators: functions in the model's file.

A runtime without our library runs them. They read the weights of the kernels, so that the file
holds them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from vision_ttt.export.program import written_out
from vision_ttt.export.translation import tidy, translated
from vision_ttt.ops.packed.block import run_op

if TYPE_CHECKING:
    import onnx_ir

INPUTS = ("y", "weights", "structures", "grid", "rotations")
"""The inputs of a node, of which some have no rotations."""


def node_functions(
    op: ModuleType,
    node: onnx_ir.Node,
    weights: Tensor,
    dim: int,
    sizes: Sequence[int],
    floats: Sequence[float],
) -> tuple[onnx_ir.Function, onnx_ir.Function]:
    """The function that a node calls by its name and overload, and that of one block.

    Args:
        op: the module of the blocks' op.
        node: of N blocks, with all its attributes.
        weights: their portable weights [N, words].
        dim, sizes, floats: of the blocks.
    """
    import onnx_ir

    # A block of Vittt without a Conv2d ignores the grid.
    on_grid = op.BLOCK.first_size > 0 and getattr(op.BLOCK.sizes(*sizes), "kernel", 1) > 0
    # onnxruntime finds no function by its overload within another.
    block_name = f"Block{node.overload}"
    given = [onnx_ir.val(name) for name in INPUTS[: len(node.inputs)]]
    y, words, _, grid, *rotations = given
    nodes: list[onnx_ir.Node] = []

    def add(operator: str, *inputs: onnx_ir.Value, **others: Any) -> onnx_ir.Value:
        nodes.append(onnx_ir.node(operator, inputs, others))
        return nodes[-1].outputs[0]

    def constant(*ints: int) -> onnx_ir.Value:
        return add("Constant", value_ints=ints)

    plane = add("Cast", grid, to=onnx_ir.DataType.INT64) if on_grid else constant(1, -1)
    out = add("Reshape", y, add("Concat", constant(0), plane, constant(dim), axis=0))
    turns = [
        add("Reshape", x, add("Concat", plane, constant(dim // 2, 2), axis=0)) for x in rotations
    ]
    for i in range(len(weights)):
        own = add("Gather", words, add("Constant", value_int=i))
        out = add(block_name, out, own, *turns)
        nodes[-1].domain = node.domain
    out = add("Reshape", out, add("Shape", y))

    static = _grid_of(node) if on_grid else (1, None)
    block = _graph(_Block(op, sizes, floats), weights[0], dim, static, len(turns) > 0)
    opsets = {**block.opset_imports, node.domain: 1}
    graph = onnx_ir.Graph(given, [out], nodes=nodes, opset_imports=opsets)
    attributes = [onnx_ir.Attr(name, x.type, None) for name, x in node.attributes.items()]
    return (
        onnx_ir.Function(
            node.domain, node.op_type, node.overload, graph=graph, attributes=attributes
        ),
        onnx_ir.Function(node.domain, block_name, graph=block, attributes=[]),
    )


def _grid_of(node: onnx_ir.Node) -> tuple[int | None, int | None]:
    constant = node.inputs[INPUTS.index("grid")].const_value
    return (None, None) if constant is None else tuple(constant.numpy().tolist())


class _Block(nn.Module):
    """A packed block of portable weights, in operations that ONNX has.

    Args:
        op: the module of the block's op.
        sizes, floats: of the block.
    """

    def __init__(self, op: ModuleType, sizes: Sequence[int], floats: Sequence[float]) -> None:
        super().__init__()
        self.op, self.sizes, self.floats = op, sizes, floats

    def forward(self, y: Tensor, weights: Tensor, rotations: Tensor | None = None) -> Tensor:
        """[B, h, w, D], [words] and [h, w, D / 2, 2] → [B, h, w, D]."""
        block, grid, dim = self.op.BLOCK, y.shape[1:3], y.shape[3]
        ints = (*grid[: block.first_size], *self.sizes)
        given = {} if rotations is None else {"rotations": rotations.flatten(0, 1)}
        views = block.split(weights, dim, self.sizes, portable=True, view=_numbers)
        # Copies, because the tensors of a scan must not be views of others.
        p = {field: view.clone() for field, view in views.items()}
        out = self.op.compute(y.flatten(1, 2), p, ints, self.floats, run_op, **given)
        return out.unflatten(1, grid)


def _numbers(words: Tensor, dtype: torch.dtype) -> Tensor:
    """``words.view(dtype)`` of int32 words, by arithmetic: ONNX has no operator on bits as such.

    Runtimes compute it once, when they load the weights.
    """
    sign_bit, bits = 31, 23
    if dtype == torch.bfloat16:  # two numbers in a word
        sign_bit, bits = 15, 7
        low = words & 0xFFFF
        words = torch.stack((low, torch.div(words - low, 2**16, rounding_mode="trunc")), -1)
        words = words.flatten(-2)
        is_negative = (words & 2**15) != 0
    else:
        is_negative = words < 0
    magnitude = words & (2**sign_bit - 1)
    fraction = magnitude & (2**bits - 1)
    # Exact quotients: ONNX's exporter divides integers as float32.
    exponent = torch.div(magnitude - fraction, 2**bits, rounding_mode="trunc")
    fraction = fraction + (exponent > 0).int() * 2**bits
    powers = torch.ldexp(torch.ones(256), (torch.arange(256).clamp(min=1) - (127 + bits)))
    x = fraction.float() * powers[exponent.long()]
    return torch.where(is_negative, -x, x).to(dtype)


def _graph(
    block: _Block, weights: Tensor, dim: int, grid: tuple[int | None, int | None], rotates: bool
) -> onnx_ir.Graph:
    """The block for any number of images on a grid, None for any height or width."""
    import onnx_ir

    # More tokens than a mini-batch: a loop traced with one step would always make one step.
    free = 5, 7 + getattr(block.op.BLOCK.sizes(*block.sizes), "mini_batch_size", 0)
    height, width = (given or any_size for given, any_size in zip(grid, free, strict=True))
    dims = [Dim("batch", min=1), *(Dim(name, min=1) for name in ("rows", "columns"))]
    of_grid = [place for place, size in enumerate(grid) if size is None]
    axes = [{0: dims[0], **{i + 1: dims[i + 1] for i in of_grid}}, {}]
    examples = [torch.zeros(2, height, width, dim), weights]
    if rotates:
        axes.append({i: dims[i + 1] for i in of_grid})
        examples.append(torch.zeros(height, width, dim // 2, 2))
    program = written_out(block, tuple(examples), tuple(axes))
    names = ["y", "weights", "rotations"][: len(examples)]
    named = [{axis: dim.__name__ for axis, dim in each.items()} for each in axes]
    model = translated(program, names, ["out"], named).model
    tidy(model)
    graph = model.graph
    for value in list(graph.initializers.values()):  # which functions do not have
        constant = onnx_ir.node("Constant", [], {"value": value.const_value})
        onnx_ir.convenience.replace_all_uses_with(value, constant.outputs[0])
        graph.insert_before(graph[0], constant)
    graph.initializers.clear()
    return graph
