"""Export to ONNX, verified by onnxruntime before the file is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from vision_ttt.engine import ModelMetadata
from vision_ttt.export.extensions import onnxruntime_library, runtimes_with_kernels
from vision_ttt.export.inputs import ExportError, InputShapes, first_line
from vision_ttt.export.kernel_nodes import fill_nodes, program_with_kernels
from vision_ttt.export.program import plain_program
from vision_ttt.export.translation import tidy, translated
from vision_ttt.export.verification import TOLERANCES, Agreement, verify
from vision_ttt.extras import require
from vision_ttt.files import write_bytes
from vision_ttt.ops.packed.weights import DTYPES

INPUT, OUTPUT = "images", "logits"
"""The names of the ONNX model's input and output."""
_AXES = {0: "batch", 2: "height", 3: "width"}


def export_onnx(
    model: nn.Module,
    metadata: ModelMetadata,
    path: Path,
    shapes: InputShapes,
    *,
    kernels: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Agreement:
    """Write ``model`` as ONNX, after comparing its outputs in a runtime with the model's.

    The input is ``images`` [B, C, H, W], normalised; the output is ``logits`` [B, num_classes]. The
    file's metadata has ``classes`` and ``input`` (mean, std, interpolation, …) as JSON.

    Args:
        model: in evaluation mode, on the CPU.
        metadata: of the checkpoint.
        path: the path of the file.
        shapes: the images that the result accepts.
        kernels: whether the blocks are nodes of the domain ``vision_ttt``, which ONNX Runtime and
            OpenVINO run by the compiled kernels with our library for them. ONNX Runtime without it
            runs functions of the file, in ONNX's own operators; OpenVINO refuses it. The outputs
            are compared without the library, and in each runtime that has it.
        dtype: of these nodes' packed weights and products, as in ``for_inference``: float32, or
            with ``kernels`` also bfloat16. The rest of the file is float32.

    Raises:
        MissingPackageError: packages of the extra [export] are missing; with ``kernels`` also
            a runtime with our library for it.
        ExportError: the dtype is another, the model cannot be translated, or the result computes
            other logits.
        OSError: the file cannot be written.
    """
    runtimes = runtimes_with_kernels() if kernels else []
    content = onnx_content(model, metadata, shapes, kernels=kernels, dtype=dtype, functions=True)
    agreements = [
        verify(run, model, shapes.to_verify(), path.name, TOLERANCES[dtype])
        for run in _runs(content, path.name, runtimes, dtype)
    ]
    write_bytes(path, content)
    return max(agreements, key=lambda agreement: agreement.difference)


def onnx_content(
    model: nn.Module,
    metadata: ModelMetadata,
    shapes: InputShapes,
    *,
    kernels: bool,
    dtype: torch.dtype = torch.float32,
    functions: bool = False,
) -> bytes:
    """The content of an ONNX file of the model, not verified; see :func:`translate`."""
    found = translate(model, shapes, kernels=kernels, dtype=dtype, functions=functions)
    found.model.metadata_props.update(
        model=metadata.model,
        classes=json.dumps(metadata.carried["classes"]),
        input=json.dumps(metadata.carried["input"]),
    )
    return found.model_proto.SerializeToString()


def translate(
    model: nn.Module,
    shapes: InputShapes,
    *,
    kernels: bool = False,
    dtype: torch.dtype = torch.float32,
    functions: bool = False,
) -> torch.onnx.ONNXProgram:
    """The model in ONNX; see :func:`export_onnx`.

    Args:
        model, shapes, kernels, dtype: as there.
        functions: whether the file holds what the nodes of the kernels stand for.

    Raises:
        MissingPackageError: packages of the extra [export] are missing.
        ExportError: the dtype is not supported, or the model cannot be translated.
    """
    require("export", "ONNX")
    supported = DTYPES if kernels else DTYPES[:1]
    if dtype not in supported:
        without = "" if kernels else " without kernels"
        raise ExportError(f"dtype must be one of {list(supported)}{without}, got {dtype}")
    if kernels:
        program = program_with_kernels(model, shapes, dtype)
    else:
        program = plain_program(model, shapes)
    axes = {axis: _AXES[axis] for axis in shapes.dynamic_axes()}
    try:
        found = translated(program, [INPUT], [OUTPUT], [axes])
        called = fill_nodes(found.model, functions)
        tidy(found.model)
        found.model.functions.update(called)
    except Exception as error:  # the translation of an operation can raise any error
        cause: BaseException = error
        while cause.__cause__ is not None:  # the errors above it say only where it was raised
            cause = cause.__cause__
        name = type(model).__name__
        raise ExportError(f"{name} cannot be translated to ONNX: {first_line(cause)}") from error
    return found


def _runs(
    content: bytes, name: str, runtimes: Collection[str], dtype: torch.dtype
) -> Iterator[Callable[[Tensor], Tensor]]:
    """The model in ONNX Runtime, and by the kernels in these runtimes."""
    yield _in_onnxruntime(content, name, kernels=False)
    if "openvino" in runtimes:
        from vision_ttt.export.openvino_model import core_of, loaded

        yield loaded(core_of(kernels=True), content, name, dtype)
    if "onnxruntime" in runtimes:
        yield _in_onnxruntime(content, name, kernels=True)


def _in_onnxruntime(content: bytes, name: str, kernels: bool) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    try:
        if kernels:
            options.register_custom_ops_library(str(onnxruntime_library()))
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common class
        raise ExportError(f"onnxruntime refuses {name}: {first_line(error)}") from error

    def run(images: Tensor) -> Tensor:
        (logits,) = session.run([OUTPUT], {INPUT: images.numpy()})
        return torch.from_numpy(logits)

    return run
