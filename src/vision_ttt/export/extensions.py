"""The libraries by which other runtimes run our nodes; ``csrc/runtimes`` has their sources."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from vision_ttt.extras import MissingPackageError

_PACKAGE = Path(__file__).parents[1]
LIBRARIES = {
    "openvino": (_PACKAGE / "_openvino.so", "the extension of OpenVINO"),
    "onnxruntime": (_PACKAGE / "_onnxruntime.so", "the library of operators for ONNX Runtime"),
}
"""Target of the Makefile → its library, and what that is."""


def openvino_extension() -> Path:
    """The library for ``openvino.Core.add_extension``, with which models with kernels load.

    Raises:
        MissingPackageError: it was not built; the message has the command.
    """
    return _library("openvino")


def onnxruntime_library() -> Path:
    """The library for ``onnxruntime.SessionOptions.register_custom_ops_library``.

    The session option ``vision_ttt.threads``, set before, limits the threads of the kernels.

    Raises:
        MissingPackageError: it was not built; the message has the command.
    """
    return _library("onnxruntime")


def runtimes_with_kernels() -> list[str]:
    """Those of "openvino" and "onnxruntime" that are installed and whose library was built.

    Raises:
        MissingPackageError: there is none; the message has the commands.
    """
    found = [name for name, (path, _) in LIBRARIES.items() if path.exists() and find_spec(name)]
    if not found:
        raise MissingPackageError(
            f"{' and '.join(path.name for path, _ in LIBRARIES.values())} are not built, or their"
            f" runtime is not installed; one is required: {_how('TARGET')}, with the target"
            f" {' or '.join(LIBRARIES)}"
        )
    return found


def _library(name: str) -> Path:
    path, what = LIBRARIES[name]
    if not path.exists():
        raise MissingPackageError(f"{path.name}, {what}, is not built; {_how(name)}")
    return path


def _how(name: str) -> str:
    return f"in the sources of vision-ttt run: make -C csrc/runtimes {name} PYTHON={sys.executable}"
