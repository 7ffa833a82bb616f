"""The launch of a kernel of whole blocks: its result, its scratch memory and its threads."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from vision_ttt.ops._native import LIBRARY, call_kernel

if LIBRARY is not None:
    for blocks in ("vittt_blocks", "vit3_block", "mamba_block"):
        getattr(LIBRARY, f"vision_ttt_packed_{blocks}_scratch").restype = ctypes.c_int64


def launch(kernel: str, problem: ctypes.Structure, y: Tensor) -> Tensor:
    """Run the kernel of a block and return its output tokens [B, T, D].

    Args:
        kernel: the name in the library. The function KERNEL_scratch returns the bytes of scratch.
        problem: the description of the call. This function sets y, out, scratch and threads.
        y: tokens [B, T, D], contiguous.

    Raises:
        MemoryError: a thread could not allocate its scratch memory.
    """
    problem.y, problem.threads = y.data_ptr(), torch.get_num_threads()
    scratch = y.new_empty(call_kernel(f"{kernel}_scratch", problem), dtype=torch.uint8)
    # Allocated after the scratch, so that the next block's scratch fits the memory that this one
    # frees.
    out = y.new_empty(y.shape)
    problem.scratch, problem.out = scratch.data_ptr(), out.data_ptr()
    if call_kernel(kernel, problem):
        raise MemoryError(f"{kernel}: not enough memory for the scratch of a thread")
    return out
