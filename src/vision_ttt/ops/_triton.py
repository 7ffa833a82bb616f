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

FOUND = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refusal(*tensors: Tensor | None, may_be_empty: bool = False) -> str | None:
    """Why Triton cannot take these tensors, which may differ in dtype, or None if it can."""
    if not FOUND:
        return "Triton is not installed (on Linux: pip install triton)"
    for x in tensors:
        if x is None:
            continue
        if x.is_cpu and not INTERPRETED:
            return "tensors are on cpu, and TRITON_INTERPRET=1 is not set"
        if not x.is_cuda and not x.is_cpu:
            return f"tensors are on {x.device.type}"
        if x.dtype not in DTYPES:
            return f"dtype {x.dtype} is not one of {DTYPES}"
        if not may_be_empty and not x.numel():
            return "a tensor is empty"
    return None
