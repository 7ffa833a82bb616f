"""Triton, the language of the GPU kernels: its presence, and the tensors that kernels support.

Triton is installed with PyTorch for CUDA on Linux. It is imported at the first call. With the
environment variable ``TRITON_INTERPRET=1`` its interpreter runs the kernels on CPU tensors. That is
slow, and happens only where a call requests the backend "triton".
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

FOUND = importlib.util.find_spec("triton") is not None
"""Whether Triton is installed."""
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
"""Whether Triton's interpreter runs the kernels. Triton accepts the same values as true."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the kernels support."""


def refusal(*tensors: Tensor | None, may_be_empty: bool = False) -> str | None:
    """The reason why the kernels do not support these tensors, or None if they do.

    The tensors may differ in dtype.
    """
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
