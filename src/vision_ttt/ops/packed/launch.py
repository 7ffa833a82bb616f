"""Running the kernel of a whole block: its result, its scratch and its threads."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from vision_ttt.ops._native import LIBRARY, call_kernel

if LIBRARY is not None:
    for block in ("vittt", "vit3"):
        getattr(LIBRARY, f"vision_ttt_packed_{block}_block_scratch").restype = ctypes.c_int64


def launch(kernel: str, problem: ctypes.Structure, y: Tensor) -> Tensor:
    """The block's tokens after it, [B, T, D].

    Args:
        kernel: its name in the library, where NAME_scratch says how many bytes it wants.
        problem: the call; y, out, scratch and threads are set here.
        y: tokens [B, T, D], contiguous.

    Raises:
        MemoryError: a thread got no memory for its scratch.
    """
    problem.y, problem.threads = y.data_ptr(), torch.get_num_threads()
    scratch = y.new_empty(call_kernel(f"{kernel}_scratch", problem), dtype=torch.uint8)
    # After the scratch: beside the hole that it leaves, the next block's finds place again.
    out = y.new_empty(y.shape)
    problem.scratch, problem.out = scratch.data_ptr(), out.data_ptr()
    if call_kernel(kernel, problem):
        raise MemoryError(f"{kernel}: no memory for the scratch of a thread")
    return out
