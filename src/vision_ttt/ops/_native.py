"""The compiled CPU kernels: found beside the package, loaded once, or reported missing once."""

from __future__ import annotations

import ctypes
import functools
import warnings
from pathlib import Path

import torch  # noqa: F401  (loads its OpenMP runtime first: the kernels then share its thread pool)

MISSING = (
    "vision-ttt's compiled CPU kernels are not there, so the slower PyTorch backend 'dual' serves. "
    "To get them, install a C++17 compiler (GCC >= 12 or Clang; on Debian: apt install g++) and "
    "install vision-ttt again: pip install --force-reinstall --no-deps vision-ttt"
)


def _load() -> ctypes.CDLL | None:
    paths = sorted(Path(__file__).parents[1].glob("_kernels.*"))
    if not paths:
        return None
    library = ctypes.CDLL(str(paths[0]))
    library.vision_ttt_instruction_set.restype = ctypes.c_char_p
    return library


LIBRARY = _load()
"""The kernels, or None where they were not built."""


@functools.cache
def warn_if_missing() -> None:
    """Say once what is lost without the kernels, and how to get them."""
    if LIBRARY is None:
        warnings.warn(MISSING, RuntimeWarning, stacklevel=2)


def instruction_set() -> str | None:
    """The instruction set that the kernels use on this machine, e.g. "avx512", or None."""
    return None if LIBRARY is None else LIBRARY.vision_ttt_instruction_set().decode()
