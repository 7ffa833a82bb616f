"""Triton, the language of the GPU kernels: whether it is there, and which tensors the kernels take.

It comes with PyTorch for CUDA on Linux and is imported at the first call. With the environment's
``TRITON_INTERPRET=1`` its interpreter runs the kernels on CPU tensors: slow, and only where backend
"triton" is asked for by name.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from vision_ttt.ops import _backend

FOUND = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def triton_serves(*tensors: Tensor) -> bool:
    """Whether the GPU kernels around ttt_linear take these tensors, which may differ in dtype.

    An override of the backend by another than "triton" leaves PyTorch's own operations only.
    """
    override = _backend._override
    interpreted = INTERPRETED and override == "triton"
    for x in tensors:
        if not (x.is_cuda or (interpreted and x.is_cpu)) or x.dtype not in DTYPES or not x.numel():
            return False
    return (
        FOUND
        and override in (None, "triton")
        and not _backend.is_transformed()
        and not _backend.exporting_onnx()
    )
