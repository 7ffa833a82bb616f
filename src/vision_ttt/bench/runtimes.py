"""Deployment of a model for inference on a CPU, by a runtime with its best settings.

Every runtime uses torch's present number of threads. Idle threads of a runtime must not slow down
the next contender: ONNX Runtime's are configured not to wait actively after a call, and the
protocol rests between turns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vision_ttt.bench.names import RUNTIMES
from vision_ttt.export import InputShapes, onnxruntime_library, openvino_extension
from vision_ttt.export.onnx_model import INPUT, OUTPUT, translate
from vision_ttt.export.openvino_model import core_of, loaded
from vision_ttt.extras import MissingPackageError

Deployed = Callable[[Tensor], Tensor]
"""Images [B, 3, h, w], float32, of the shape it was made for → logits [B, num_classes]."""

# max|got − wanted| / max|wanted| of the logits. A runtime may be less exact than the modules, but
# must compute the same function.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


class Runtime(NamedTuple):
    """A runtime that deploys models."""

    deploy: Callable[[nn.Module, Tensor, torch.dtype], Deployed]
    """(model in evaluation mode, images, dtype) → its call."""
    packages: tuple[str, ...] = ()
    """The packages that it needs."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    """The dtypes that it supports."""


def refusal(name: str, dtype: torch.dtype) -> str | None:
    """The reason why a runtime is not available for the dtype, or None if it is."""
    runtime = TABLE[name]
    missing = [package for package in runtime.packages if find_spec(package) is None]
    if missing:
        return f"{', '.join(missing)} not installed: pip install 'vision-ttt[bench]'"
    if name in _LIBRARIES:
        try:
            _LIBRARIES[name]()
        except MissingPackageError as error:
            return str(error)
    if dtype not in runtime.dtypes:
        return f"{RUNTIMES[name]} computes in float32 here"
    return None


def deploy(name: str, model: nn.Module, images: Tensor, dtype: torch.dtype) -> Deployed:
    """Deploy a model, in evaluation mode and float32, by a runtime that supports the dtype."""
    return TABLE[name].deploy(model, images, dtype)


def find_difference(
    deployed: Deployed, model: nn.Module, images: Tensor, dtype: torch.dtype
) -> str | None:
    """Compare the logits of a deployed model with those of the modules in float32.

    Returns:
        A description of the difference, or None if it is within the dtype's tolerance.
    """
    with torch.inference_mode():
        wanted = model(images)
        got = deployed(images).float()
    if got.shape != wanted.shape or not got.isfinite().all():
        return f"logits {list(got.shape)} are not finite or not {list(wanted.shape)}"
    error = ((got - wanted).abs().max() / wanted.abs().max()).item()
    if error <= TOLERANCES[dtype]:
        return None
    return f"logits are off by {error:.2g} of the largest, over {TOLERANCES[dtype]:.0e}"


def pack(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The copy of a model that the runtime for_inference calls."""
    from vision_ttt.acceleration import for_inference

    return for_inference(model, dtype=None if dtype == torch.float32 else dtype)


def _for_inference(model: nn.Module, images: Tensor, dtype: torch.dtype) -> Deployed:
    return torch.inference_mode()(pack(model, dtype))


def _inductor(model: nn.Module, images: Tensor, dtype: torch.dtype) -> Deployed:
    # Without gradients, weights become constants that are packed for the products.
    compiled = torch.compile(model.to(dtype), dynamic=False, options={"freezing": True})
    return torch.no_grad()(lambda images: compiled(images.to(dtype)))


def _onnxruntime(
    model: nn.Module, images: Tensor, dtype: torch.dtype, *, kernels: bool = False
) -> Deployed:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.force_spinning_stop", "1")
    packed = {"kernels": True, "dtype": dtype} if kernels else {}
    if kernels:
        # Its threads that wait actively for the next node would take the kernels' processors.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("vision_ttt.threads", str(torch.get_num_threads()))
        options.register_custom_ops_library(str(onnxruntime_library()))
    content = _onnx_content(model, images, **packed)
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])


def _openvino(
    model: nn.Module, images: Tensor, dtype: torch.dtype, *, kernels: bool = False
) -> Deployed:
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    packed = {"kernels": True, "dtype": dtype} if kernels else {}
    content = _onnx_content(model, images, **packed)
    return loaded(core_of(kernels), content, "the model", dtype, settings)


def _onnx_content(model: nn.Module, images: Tensor, **packed: Any) -> bytes:
    """An ONNX file of fixed sizes; ``packed`` as in ``translate``."""
    batch, *size = images.shape
    translated = translate(model, InputShapes(*size, batch_size=batch), **packed)
    return translated.model_proto.SerializeToString()


_ONNX = ("onnx", "onnxscript")
TABLE: Mapping[str, Runtime] = {
    "for_inference": Runtime(_for_inference),
    "inductor": Runtime(_inductor),
    "onnxruntime": Runtime(_onnxruntime, (*_ONNX, "onnxruntime"), (torch.float32,)),
    "onnxruntime-kernels": Runtime(
        functools.partial(_onnxruntime, kernels=True), (*_ONNX, "onnxruntime")
    ),
    "openvino": Runtime(_openvino, (*_ONNX, "openvino")),
    "openvino-kernels": Runtime(functools.partial(_openvino, kernels=True), (*_ONNX, "openvino")),
}
"""Name of :data:`vision_ttt.bench.names.RUNTIMES` → runtime."""
_LIBRARIES = {"onnxruntime-kernels": onnxruntime_library, "openvino-kernels": openvino_extension}
