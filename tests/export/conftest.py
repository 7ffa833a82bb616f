"""A small trained-like model; and which tests need the packages of the extra [export]."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from described_models import describe_classifier
from vision_ttt.engine import ModelMetadata
from vision_ttt.engine.building import build_model
from vision_ttt.models.linear_vit import LinearViT
from vision_ttt.tasks.images.models import data_config

collect_ignore = []
if any(find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript")):
    collect_ignore += ["test_onnx_model.py", "test_openvino_model.py", "test_kernel_nodes.py"]
    collect_ignore += ["test_onnxruntime_kernels.py"]

Made = tuple[nn.Module, ModelMetadata]


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Made]:
    """Build a model whose every parameter matters, with three classes, and its metadata."""

    def make(name: str = "vittt_nano_patch4_32", **arguments: object) -> Made:
        if name.startswith("vittt"):
            arguments = {"depth": 1, "embed_dim": 32, "num_heads": 1, "img_size": 20, **arguments}
        arguments = {"num_classes": 3, "in_chans": 3, **arguments}
        torch.manual_seed(0)
        model = build_model(name, arguments).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            if isinstance(model, LinearViT):  # what its inner models learn would be below rounding
                for path, parameter in model.named_parameters():
                    if ".attn." in path:
                        parameter.mul_(3)
        described = data_config(model, arguments.get("img_size"))
        return model, describe_classifier(name, arguments, ("cat", "dog", "émeu"), described)

    return make
