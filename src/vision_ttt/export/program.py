"""Export to `torch.export` programs (.pt2), with this package's kernels or PyTorch's own ops."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from vision_ttt.engine import ModelMetadata
from vision_ttt.export.inputs import ExportError, InputShapes, first_line
from vision_ttt.export.verification import Agreement, verify
from vision_ttt.files import write_bytes
from vision_ttt.ops import use_backend
from vision_ttt.ops._op import Op
from vision_ttt.ops._table import TABLE

METADATA_FILE = "vision_ttt.json"
"""The extra file in a .pt2 that holds the checkpoint's `ModelMetadata`."""


def export_program(
    model: nn.Module,
    metadata: ModelMetadata,
    path: Path,
    shapes: InputShapes,
    *,
    portable: bool = False,
) -> Agreement:
    """Write ``model`` as a .pt2 for the CPU, after comparing its outputs with the model's.

    Args:
        model: in evaluation mode, on the CPU.
        metadata: stored in the file as ``METADATA_FILE``.
        path: the path of the .pt2.
        shapes: the images that the program accepts.
        portable: whether to use PyTorch's operations only, which are slower. Otherwise the program
            calls the compiled kernels, and loading it requires ``import vision_ttt``.

    Raises:
        ExportError: the model cannot be traced, the program cannot be loaded again, or it computes
            other logits.
        OSError: the file cannot be written.
    """
    if portable:
        program = plain_program(model, shapes)
    else:
        program = _traced(model, (shapes.example(),), (shapes.dynamic_axes(),), backend=None)
    content = io.BytesIO()
    extra = {METADATA_FILE: json.dumps(asdict(metadata))}
    torch.export.save(program, content, extra_files=extra)
    content.seek(0)
    try:
        loaded = torch.export.load(content).module()
    # Loading evaluates conditions on symbolic sizes again, and cannot decide some of them.
    except Exception as error:
        raise ExportError(
            f"torch.export cannot load {path.name}, which it has saved: {first_line(error)}"
        ) from error
    agreement = verify(loaded, model, shapes.to_verify(), path.name)
    write_bytes(path, content.getvalue())
    return agreement


def plain_program(model: nn.Module, shapes: InputShapes) -> ExportedProgram:
    """Trace the model into PyTorch's operations only.

    Args:
        model: in evaluation mode, on the CPU.
        shapes: the images that the program accepts.

    Raises:
        ExportError: the model cannot be traced, or holds an op without a decomposition.
    """
    return written_out(model, (shapes.example(),), (shapes.dynamic_axes(),))


def written_out(
    model: nn.Module,
    examples: tuple[Tensor, ...],
    axes: tuple[Mapping[int, Any], ...],
    nodes: Mapping[Any, Callable[..., Tensor]] | None = None,
) -> ExportedProgram:
    """Trace a module into PyTorch's operations, and into what stands for packed blocks.

    Args:
        model: in evaluation mode, on the CPU.
        examples: its arguments.
        axes: of each argument the dynamic axes, as ``torch.export`` expects them.
        nodes: packed blocks' ops → what stands for them.

    Raises:
        ExportError: the module cannot be traced, or holds an op without a decomposition.
    """
    # Packed blocks have no other backend than their kernels.
    program = _traced(model, examples, axes, backend=None if nodes else "dual")
    with torch.no_grad():
        program = _at_all_sizes(program.run_decompositions(decompositions() | (nodes or {})))
    left = sorted(
        {
            str(node.target)
            for module in program.graph_module.modules()
            if isinstance(module, torch.fx.GraphModule)
            for node in module.graph.nodes
            if str(node.target).startswith("vision_ttt.")
        }
    )
    if left:
        advice = "export without --kernels" if nodes else "export a .pt2 that is not portable"
        raise ExportError(
            f"{type(model).__name__} holds {', '.join(left)}, which cannot be written in PyTorch's "
            f"own operations; {advice}"
        )
    return program


def _traced(
    model: nn.Module,
    examples: tuple[Tensor, ...],
    axes: tuple[Mapping[int, Any], ...],
    *,
    backend: str | None,
) -> ExportedProgram:
    """Trace a module with every op by ``backend``.

    Raises:
        ExportError: the module's code depends on values or sizes in a way that cannot be traced.
    """
    try:
        with torch.no_grad(), use_backend(backend):
            program = torch.export.export(model, examples, dynamic_shapes=axes)
    # Tracing runs the model's code with symbolic sizes, which can raise any error.
    except Exception as error:
        raise ExportError(
            f"{type(model).__name__} cannot be traced: {first_line(error)}"
        ) from error
    return _at_all_sizes(program)


def _at_all_sizes(program: ExportedProgram) -> ExportedProgram:
    """Remove the guards by which the tracer excludes single sizes.

    It excludes sizes for which the code or PyTorch has a shortcut, such as no interpolation at the
    model's own size, or a tensor that is empty where there are fewer patches than registers. The
    shortcut gives the same result, which :func:`verify` checks. The guards on multiples of the
    patch size and on the smallest size stay.
    """
    program._guards_code = [
        guard for guard in program._guards_code if "!=" not in guard and not guard.endswith(" >= 2")
    ]
    return program


def _decomposition(op: Op) -> Callable[..., tuple[Tensor, ...]]:
    """The op as a scan, with its custom op's arguments. The backend is ignored."""

    def decomposed(*arguments: Any) -> tuple[Tensor, ...]:
        *problem, save_states, _ = arguments
        assert not save_states, "exported without gradients"
        o, *state = op.exported(op.inputs(*problem))
        return o, *state, *(x.new_empty(0, *x.shape) for x in state)

    return decomposed


def decompositions() -> dict[Any, Callable[..., tuple[Tensor, ...]]]:
    """Op → decomposition into PyTorch's own operations, to which ops are opaque.

    For ``ExportedProgram.run_decompositions``, and programs without this package.
    """
    return {op.forward_op: _decomposition(op) for op in TABLE.values() if op.backend_at_runtime}
