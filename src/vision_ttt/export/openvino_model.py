"""Export to OpenVINO's own files, and models in it, with our kernels on request."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vision_ttt.engine import ModelMetadata
from vision_ttt.export.extensions import openvino_extension
from vision_ttt.export.inputs import ExportError, InputShapes
from vision_ttt.export.onnx_model import onnx_content
from vision_ttt.export.verification import TOLERANCES, Agreement, verify
from vision_ttt.extras import require
from vision_ttt.files import write_bytes

if TYPE_CHECKING:
    import openvino

MODEL_FILE, WEIGHTS_FILE = "model.xml", "model.bin"
"""The files of a folder."""


def export_openvino(
    model: nn.Module,
    metadata: ModelMetadata,
    folder: Path,
    shapes: InputShapes,
    *,
    kernels: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Agreement:
    """Write ``model`` for OpenVINO, after comparing the outputs of what loads with the model's.

    The folder has ``model.xml`` and ``model.bin``. Input and output are those of
    :func:`export_onnx`; the model's runtime information has ``vision_ttt/model``, and
    ``vision_ttt/classes`` and ``vision_ttt/input`` as JSON.

    Args:
        model: in evaluation mode, on the CPU.
        metadata: of the checkpoint.
        folder: the path of the folder.
        shapes: the images that the result accepts.
        kernels: whether the blocks run by the compiled kernels. Loading the result then requires
            :func:`openvino_extension`.
        dtype: of these blocks, as in :func:`export_onnx`.

    Raises:
        MissingPackageError: OpenVINO, a package of the extra [export] or the extension is missing.
        ExportError: the dtype is another, the model cannot be translated, or the result computes
            other logits.
        OSError: the folder cannot be written.
    """
    core = core_of(kernels)
    import openvino

    content = onnx_content(model, metadata, shapes, kernels=kernels, dtype=dtype)
    translated = _named(folder.name, lambda: core.read_model(BytesIO(content)))
    told = {"model": metadata.model}
    for name in ("classes", "input"):
        told[name] = json.dumps(metadata.carried[name], ensure_ascii=False)
    for name, text in told.items():
        translated.set_rt_info(text, ["vision_ttt", name])
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        openvino.save_model(translated, made / MODEL_FILE, compress_to_fp16=False)
        run = loaded(core, made / MODEL_FILE, folder.name, dtype)
        agreement = verify(run, model, shapes.to_verify(), folder.name, TOLERANCES[dtype])
        folder.mkdir(exist_ok=True)
        for file in (WEIGHTS_FILE, MODEL_FILE):
            write_bytes(folder / file, (made / file).read_bytes())
    return agreement


def core_of(kernels: bool) -> openvino.Core:
    """OpenVINO, with our extension on request.

    Raises:
        MissingPackageError: OpenVINO is not installed, or the extension was not built.
        ExportError: the extension was built with another version of OpenVINO.
    """
    require("bench", "OpenVINO")
    import openvino

    core = openvino.Core()
    if kernels:
        extension = openvino_extension()
        _named(
            f"{extension.name}, built with another version,", lambda: core.add_extension(extension)
        )
    return core


def loaded(
    core: openvino.Core,
    source: Path | bytes,
    name: str,
    dtype: torch.dtype = torch.float32,
    settings: Mapping[str, Any] | None = None,
) -> Callable[[Tensor], Tensor]:
    """A call of a model in a file or in the content of an ONNX file, in float32 or bfloat16.

    Raises:
        ExportError: OpenVINO refuses the model.
    """
    content = BytesIO(source) if isinstance(source, bytes) else source
    # Set in both cases, because the default is bfloat16 where the processor has it.
    hint = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    settings = {"INFERENCE_PRECISION_HINT": hint, **(settings or {})}
    compiled = _named(name, lambda: core.compile_model(core.read_model(content), "CPU", settings))
    request = compiled.create_infer_request()

    def run(images: Tensor) -> Tensor:
        # On one thread infer() of OpenVINO 2026.4 hides exceptions and returns what is in memory.
        request.start_async([images.numpy()], share_inputs=True)
        request.wait()
        return torch.from_numpy(request.get_output_tensor(0).data.copy())

    return run


def _named(name: str, step: Callable[[], Any]) -> Any:
    try:
        return step()
    except RuntimeError as error:
        # All other lines say where in OpenVINO's sources the error was raised.
        lines = [line for line in str(error).splitlines() if line.strip()]
        cause = next((line for line in lines if line.startswith("vision_ttt: ")), lines[-1])
        raise ExportError(f"OpenVINO refuses {name}: {cause}") from error
