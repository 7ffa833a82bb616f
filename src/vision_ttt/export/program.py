"""`torch.export` programs (.pt2): with this package's kernels, or of PyTorch's operations only."""

from __future__ import annotations

import copy
import io
import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from torch.export import ExportedProgram

from vision_ttt.engine import ModelMetadata
from vision_ttt.engine.files import write_bytes
from vision_ttt.export.inputs import ExportError, InputShapes
from vision_ttt.export.plain_ops import decompositions
from vision_ttt.export.verification import Agreement, verify
from vision_ttt.layers import unfuse
from vision_ttt.ops import use_backend

METADATA_FILE = "vision_ttt.json"
"""Name of the extra file in a .pt2 that holds the checkpoint's `ModelMetadata`."""


def export_program(
    model: nn.Module,
    metadata: ModelMetadata,
    path: Path,
    shapes: InputShapes,
    *,
    portable: bool = False,
) -> Agreement:
    """Write ``model`` as a .pt2 for the CPU, after running what is written beside the model.

    Args:
        model: in evaluation mode, on the CPU.
        metadata: put into the file as ``METADATA_FILE``.
        path: of the .pt2.
        shapes: images that the program takes.
        portable: PyTorch's operations only, so that loading needs no vision_ttt; slower. Otherwise
            the program calls the compiled kernels, and ``import vision_ttt`` must come first.

    Raises:
        ExportError: the model cannot be traced, or the program does not compute the same.
        OSError: the file cannot be written.
    """
    program = plain_program(model, shapes) if portable else traced(model, shapes, backend=None)
    content = io.BytesIO()
    extra = {METADATA_FILE: json.dumps(asdict(metadata))}
    torch.export.save(program, content, extra_files=extra)
    content.seek(0)
    loaded = torch.export.load(content).module()
    agreement = verify(loaded, model, shapes.to_verify(), path.name)
    write_bytes(path, content.getvalue())
    return agreement


def plain_program(model: nn.Module, shapes: InputShapes) -> ExportedProgram:
    """The model in PyTorch's operations only.

    Raises:
        ExportError: it cannot be traced, or holds an op for which there is no decomposition.
    """
    own = copy.deepcopy(model)
    unfuse(own)  # parts have decompositions, ops of several parts have none
    program = traced(own, shapes, backend="dual")
    with torch.no_grad():
        program = _at_all_sizes(program.run_decompositions(decompositions()))
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
        raise ExportError(
            f"{type(model).__name__} holds {', '.join(left)}, which cannot be written in PyTorch's "
            "own operations; export a .pt2 that is not portable"
        )
    return program


def traced(model: nn.Module, shapes: InputShapes, *, backend: str | None) -> ExportedProgram:
    """The model as a graph for any images of these shapes, every op by ``backend``.

    Raises:
        ExportError: its code depends on values or sizes in a way that cannot be traced.
    """
    try:
        with torch.no_grad(), use_backend(backend):
            program = torch.export.export(
                model, (shapes.example(),), dynamic_shapes=(shapes.dynamic_axes(),)
            )
    # Tracing runs the model's code on symbols, which may fail in any way.
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ExportError(f"{type(model).__name__} cannot be traced: {reason}") from error
    return _at_all_sizes(program)


def _at_all_sizes(program: ExportedProgram) -> ExportedProgram:
    """Take back the tracer's "not at this size".

    It leaves out sizes at which the code takes a shortcut to the same result, such as no
    interpolation at the model's own size; that it is the same is verified. Which sizes are whole
    patches, and how small one may be, stays checked.
    """
    program._guards_code = [guard for guard in program._guards_code if "!=" not in guard]
    return program
