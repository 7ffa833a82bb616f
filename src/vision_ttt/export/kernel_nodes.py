"""Packed blocks as nodes of an ONNX graph, which OpenVINO and ONNX Runtime run by our libraries."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from vision_ttt.acceleration.inference import pack_blocks, told
from vision_ttt.export.inputs import ExportError, InputShapes
from vision_ttt.export.node_functions import node_functions
from vision_ttt.export.program import written_out
from vision_ttt.ops.packed import mamba_block, swiglu_ttt_block, vit3_block, vittt_blocks
from vision_ttt.ops.packed.block import LINE, WORD, Block
from vision_ttt.ops.packed.weights import PackedStructure, unpack

if TYPE_CHECKING:
    import onnx_ir

DOMAIN, NODE = "vision_ttt", "PackedBlocks"
_OPS = {op.BLOCK.name: op for op in (vittt_blocks, vit3_block, mamba_block)}
_BASE = LINE * WORD.itemsize  # bytes that are added to offsets, so that 0 is null
_NUMBER, _POINTER, _PACKED = range(3)  # as packed_blocks.h has them


def program_with_kernels(
    model: nn.Module, shapes: InputShapes, dtype: torch.dtype
) -> ExportedProgram:
    """Trace the model with its blocks as nodes of ONNX, to be completed by :func:`fill_nodes`.

    ``dtype`` is that of the packed weights.

    Raises:
        ExportError: the kernels do not support a block, or the model has none.
    """
    packed, stay = pack_blocks(model, dtype)
    if stay:
        raise ExportError(f"the kernels do not support {told(stay)}; export without --kernels")
    nodes = {op.OP.forward_op: functools.partial(_node, name) for name, op in _OPS.items()}
    nodes[swiglu_ttt_block.OP.forward_op] = _refuse_linear_vit
    program = written_out(packed, (shapes.example(),), (shapes.dynamic_axes(),), nodes)
    if not any(str(node.target).startswith("onnx_symbolic") for node in program.graph.nodes):
        raise ExportError(
            f"{type(model).__name__} has no block of Vittt, ViT³, H-ViT³, Vim or Mamba-Reg for the "
            "kernels; export without --kernels"
        )
    return program


def _refuse_linear_vit(*_: Any) -> Tensor:
    raise ExportError("the kernels do not support linearised ViTs; export without --kernels")


def _node(kernel: str, *arguments: Any) -> Tensor:
    """A packed block's op as a node of ONNX with the weights as they are."""
    block, given = _OPS[kernel].BLOCK, _OPS[kernel].Inputs(*arguments)._asdict()
    y, weights, ints = given["y"], given["weights"], given["ints"]
    if given.get("modulation") is not None:
        raise ExportError("the kernels do not support blocks with a condition")
    grid, sizes = (*ints[: block.first_size], 0, 0)[:2], ints[block.first_size :]
    tensors = [y, weights, weights, torch.stack([torch.scalar_tensor(x, dtype=WORD) for x in grid])]
    if given.get("rotations") is not None:
        tensors.append(given["rotations"])
    numbers = {"sizes": [*sizes], "floats": [*given.get("floats", [given.get("eps")])]}
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{NODE}",
        tensors,
        {"kernel": kernel, "dim": y.shape[-1], **numbers},
        dtype=y.dtype,
        shape=y.shape,
        version=1,
    )


def fill_nodes(model: onnx_ir.Model, with_functions: bool) -> dict[Any, onnx_ir.Function]:
    """Give the nodes weights in the layout of every processor, and what describes the blocks.

    Returns:
        The functions that the nodes call where the kernels are missing, by their names.
    """
    import onnx_ir

    called: dict[Any, onnx_ir.Function] = {}
    overloads: dict[Any, str] = {}
    for node in model.graph:
        if node.domain != DOMAIN:
            continue
        numbers = {name: attribute.value for name, attribute in node.attributes.items()}
        op = _OPS[numbers.pop("kernel")]
        weights = torch.from_numpy(node.inputs[1].const_value.numpy().copy())
        filled = _portable(op.BLOCK, torch.atleast_2d(weights), **numbers)
        for place, x in enumerate(filled, 1):
            constant = onnx_ir.tensor(x.numpy(), name=f"{node.outputs[0].name}_{place}")
            value = onnx_ir.Value(
                name=constant.name,
                shape=constant.shape,
                type=onnx_ir.TensorType(constant.dtype),
                const_value=constant,
            )
            model.graph.register_initializer(value)
            node.replace_input_with(place, value)
        for name in numbers:
            del node.attributes[name]
        node.attributes.add(onnx_ir.AttrInt64s("kinds", _kinds(op.BLOCK)))
        if with_functions:
            grid = node.inputs[3].const_value
            static = None if grid is None else grid.tobytes()
            # Nodes share a function if all of this is equal.
            key = op, filled[0].shape, str(numbers), static, len(node.inputs)
            node.overload = overloads.setdefault(key, str(len(overloads)))
            if node.op_identifier() not in called:
                functions = node_functions(op, node, filled[0], **numbers)
                called |= {function.identifier(): function for function in functions}
    return called


def _portable(
    block: Block, weights: Tensor, dim: int, sizes: list[int], floats: list[float]
) -> tuple[Tensor, Tensor]:
    """Portable weights of N blocks, and the structures [N, words] that the kernel reads.

    A pointer in these is an offset in the weights.
    """
    vectors = []
    for words in weights:
        found = block.split(words, dim, sizes)
        for name, place in block.places(dim, sizes).items():
            if place.is_packed:
                found[name] = unpack(found[name], *place.size)
        vectors.append(block.join(found, dim, sizes, portable=True))
    ints, shape = (*(1,) * block.first_size, *sizes), (1, 1, dim)
    content = block.describe(shape, _BASE, len(weights), ints, floats, portable=True)
    structures = torch.frombuffer(bytearray(content), dtype=WORD)
    return torch.stack(vectors), structures.unflatten(0, (len(weights), -1))


def _kinds(block: Block) -> list[int]:
    """What each word of the block's structure is, for :file:`csrc/runtimes/packed_blocks.h`."""
    kinds = [_NUMBER] * math.ceil(ctypes.sizeof(block.structure) / 8)
    for offset, kind in _pointers(block.structure):
        kinds[offset // 8] = kind
    return kinds


def _pointers(structure: type[ctypes.Structure], start: int = 0) -> Iterator[tuple[int, int]]:
    for name, field in structure._fields_:
        offset = start + getattr(structure, name).offset
        if field is ctypes.c_void_p:
            yield offset, _POINTER
        elif issubclass(field, ctypes.Structure):
            yield from _pointers(field, offset)
            if field is PackedStructure:
                yield offset, _PACKED
