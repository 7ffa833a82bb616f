"""The compiled CPU kernels: loaded once from the package, or reported missing once."""

from __future__ import annotations

import ctypes
import functools
import json
import shlex
import struct
import sys
import warnings
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlparse
from urllib.request import url2pathname

import torch  # its OpenMP runtime is loaded first, so that the kernels share its thread pool
from torch import Tensor

from vision_ttt import environment

_SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")

INSTRUCTION_SETS = ("baseline", "avx2", "avx512", "avx512bf16", "amx")
"""The instruction sets that the kernels are compiled for, in the order of csrc/dispatch.cpp.

The environment variable ``VISION_TTT_CPU_ISA`` sets the highest one that may be used.
"""

LANES = 16
"""Floats of the widest vector. A multiple of it fits the vectors of every instruction set."""


def _load() -> ctypes.CDLL | None:
    """Load the kernels.

    Raises:
        EnvironmentVariableError: ``VISION_TTT_CPU_ISA`` is no instruction set.
        ImportError: the library is damaged, of another platform, or lacks one that it needs.
    """
    # Only the name that setup.py uses: other libraries in this folder are from earlier builds.
    path = Path(__file__).parents[1] / f"_kernels{_SUFFIX}"
    if not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(
            f"vision-ttt's compiled CPU kernels cannot be loaded: {error}; build them anew: "
            f"{install_command()}"
        ) from error
    library.vision_ttt_instruction_set.restype = ctypes.c_char_p
    library.vision_ttt_chunk_tokens.restype = c_int64
    library.vision_ttt_sizeof.restype = c_int64
    asked = environment.one_of("VISION_TTT_CPU_ISA", INSTRUCTION_SETS)
    used = library.vision_ttt_instruction_set().decode()
    if asked is not None and asked != used:
        warnings.warn(
            f"VISION_TTT_CPU_ISA is {asked}, which this machine lacks: the kernels for {used} run",
            RuntimeWarning,
            stacklevel=2,
        )
    return library


def install_command() -> str:
    """The command that reinstalls vision-ttt with its kernels from its original source.

    It bypasses pip's cache, which keeps a package that was built without a compiler.
    """
    try:
        record = metadata.distribution("vision-ttt").read_text("direct_url.json")
        origin = {} if record is None else json.loads(record)
    except metadata.PackageNotFoundError:  # used from its sources, not installed
        checkout = Path(__file__).parents[3].as_uri()
        origin = {"url": checkout, "dir_info": {"editable": True}}
    source = origin.get("url", "vision-ttt")  # pip records no URL for a package from an index
    if "vcs_info" in origin:
        source = f"{origin['vcs_info']['vcs']}+{source}"
    elif "dir_info" in origin:
        source = url2pathname(urlparse(source).path)
    editable = "--editable " if origin.get("dir_info", {}).get("editable") else ""
    python, source = shlex.quote(sys.executable), shlex.quote(source)
    return f"{python} -m pip install --force-reinstall --no-deps --no-cache-dir {editable}{source}"


LIBRARY = _load()
"""The kernels, or None where they were not built."""


@functools.cache
def warn_if_missing() -> None:
    """Warn once that the kernels are missing, with the command that installs them."""
    if LIBRARY is None:
        warnings.warn(
            "vision-ttt's compiled CPU kernels are missing, so the slower PyTorch backend 'dual' "
            "runs. To get them, install a C++17 compiler (GCC >= 12 or Clang; on Debian: apt "
            f"install g++) and run: {install_command()}",
            RuntimeWarning,
            stacklevel=2,
        )


def instruction_set() -> str | None:
    """The instruction set that the kernels use on this machine, e.g. "avx512", or None."""
    return None if LIBRARY is None else LIBRARY.vision_ttt_instruction_set().decode()


def refusal(
    *tensors: Tensor | None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    may_be_empty: bool = False,
) -> str | None:
    """The reason why the kernels do not support these tensors, or None if they do."""
    for x in tensors:
        if x is None:
            continue
        if not x.is_cpu:
            return f"a tensor is on {x.device.type}"
        if x.dtype not in dtypes:
            return f"dtype {x.dtype} is not one of {dtypes}"
        if not may_be_empty and x.numel() == 0:
            return "a tensor is empty"
    return None if LIBRARY is not None else "the compiled kernels are missing"


def no_vectors(channels: int) -> str | None:
    """The reason why the kernels do not support so many channels, or None if they do."""
    return f"{channels} channels are no multiple of {LANES}" if channels % LANES else None


Structure = TypeVar("Structure", bound=type[ctypes.Structure])


def mirrors(name: str) -> Callable[[Structure], Structure]:
    """Decorate a structure that the kernels declare as ``name``: both must have the same size.

    The decorator adds a function ``pack``, which converts the numbers of all fields to bytes; the
    fields of a nested structure stand in its place. It takes half the time of the structure's
    constructor. A null pointer is 0.

    Raises:
        ImportError: the sizes differ, because the kernels were built from other sources.
    """

    def compare(structure: Structure) -> Structure:
        here = ctypes.sizeof(structure)
        there = here if LIBRARY is None else LIBRARY.vision_ttt_sizeof(name.encode())
        if here != there:
            raise ImportError(
                f"{name} has {here} bytes here and {there} in the compiled CPU kernels, which were "
                f"built from other sources; build them anew: {install_command()}"
            )
        structure.mirrored = name
        structure.pack = struct.Struct(f"@{_codes(structure)}0q").pack
        return structure

    return compare


def _codes(kind: Any) -> str:
    """The format of a type in the notation of the module ``struct``, a code for each number."""
    if issubclass(kind, ctypes.Structure):
        return "".join(_codes(field) for _, field in kind._fields_)
    if issubclass(kind, ctypes.Array):
        return kind._length_ * _codes(kind._type_)
    return kind._type_


@mirrors("Sequence")
class SequencePointer(ctypes.Structure):
    """``Sequence`` of csrc/sequence.h."""

    _fields_ = (("data", c_void_p), ("batch", c_int64), ("token", c_int64))


def sequence(x: Tensor | None) -> tuple[int, int, int]:
    """The fields of a :class:`SequencePointer` to x [B, T, C]."""
    return (0, 0, 0) if x is None else (x.data_ptr(), *x.stride()[:2])


def pointer(x: Tensor | None) -> int:
    """The address of a tensor's first number, 0 for None."""
    return 0 if x is None else x.data_ptr()


def contiguous_last(x: Tensor) -> Tensor:
    """x itself where its last axis is contiguous, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def call_kernel(name: str, *structures: ctypes.Structure | bytes) -> int:
    """Run a kernel on its structures, without Python's global lock, and return its status."""
    return getattr(LIBRARY, name)(*[x if type(x) is bytes else ctypes.byref(x) for x in structures])


def run_kernel(name: str, *structures: ctypes.Structure | bytes) -> None:
    """Run a kernel whose only failure is a lack of memory.

    Raises:
        MemoryError: the kernel could not allocate its scratch memory.
    """
    if call_kernel(name, *structures):
        raise MemoryError(f"{name}: not enough memory for its scratch")
