"""`vision-ttt export CHECKPOINT OUTPUT`."""

import logging
import traceback
from pathlib import Path

import jsonargparse
import torch
from torch import nn

from vision_ttt.cli.plain_console import plain_console
from vision_ttt.engine import ModelMetadata
from vision_ttt.export import (
    Agreement,
    ExportError,
    InputShapes,
    accepting_any_size,
    export_onnx,
    export_openvino,
    export_program,
    export_timm,
)
from vision_ttt.tasks import load_model

_LOGGER = logging.getLogger(__name__)


def run(arguments: jsonargparse.Namespace) -> int:
    """Export, run the result beside the checkpoint's model, and say how well they agree."""
    output = Path(arguments.output)
    model, metadata = load_model(arguments.checkpoint)
    with plain_console(stderr=True).status(f"exporting {metadata.model}"):
        try:
            agreement = _export(model, metadata, output, arguments)
        except ExportError:
            if arguments.traceback:
                traceback.print_exc()
            raise
    _show(output, metadata.model, agreement)
    if metadata.carried.get("sequences"):
        _LOGGER.warning(
            "the model was trained on images at their own proportions (naflex). %s describes a"
            " centre crop of one size as preprocessing; accuracy may differ",
            output,
        )
    return 0


def _export(
    model: nn.Module, metadata: ModelMetadata, output: Path, arguments: jsonargparse.Namespace
) -> Agreement:
    if output.suffix == "":
        return export_timm(model, metadata, output)
    if arguments.dynamic_size:
        model = accepting_any_size(model, metadata)
    shapes = InputShapes.of(
        model,
        metadata.carried["input"]["input_size"],
        batch_size=arguments.batch_size,
        dynamic_size=arguments.dynamic_size,
    )
    packed = {"kernels": arguments.kernels, "dtype": getattr(torch, arguments.dtype)}
    if output.suffix == ".onnx":
        return export_onnx(model, metadata, output, shapes, **packed)
    if output.suffix == ".openvino":
        return export_openvino(model, metadata, output, shapes, **packed)
    return export_program(model, metadata, output, shapes, portable=arguments.portable)


def _show(output: Path, name: str, agreement: Agreement) -> None:
    console = plain_console()
    shapes = ", ".join(" × ".join(map(str, shape)) for shape in agreement.shapes)
    files = output.iterdir() if output.is_dir() else (output,)
    size = sum(file.stat().st_size for file in files) / 2**20
    console.say(f"{output}: {name}, {size:.1f} MiB")
    console.say(
        f"ran beside the checkpoint's model on images {shapes}; largest difference"
        f" {agreement.difference:.1e} of the largest output"
    )
