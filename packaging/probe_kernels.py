"""Run an op on its compiled kernels and print what the process is made of, as JSON.

Exits with 1 where the kernels are missing, differ from the reference, or where the process holds
more than one OpenMP runtime.
"""

import json
import platform
import shutil
import sys
from pathlib import Path

import torch

import vision_ttt
from vision_ttt.ops import _native, ttt_linear

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cl")


def main() -> int:
    """Print the findings and return the exit code."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    q, k, v = torch.randn(3, 2, 196, 3, 64)
    inputs = (q, k, v, torch.rand(2, 196, 3) / 64, torch.zeros(3, 64, 64), torch.zeros(3, 64))
    difference = None
    if _native.LIBRARY is not None:
        compiled = ttt_linear(*inputs, backend="cpu")
        difference = (compiled - ttt_linear(*inputs, backend="reference")).abs().max().item()
    runtimes = openmp_runtimes()
    findings = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vision_ttt": str(Path(vision_ttt.__file__).parent),
        "compilers": [name for name in COMPILERS if shutil.which(name)],
        "instruction_set": _native.instruction_set(),
        "difference": difference,
        "openmp_runtimes": runtimes,
    }
    print(json.dumps(findings, indent=2))
    agrees = difference is not None and difference < 1e-4
    return int(not agrees or (runtimes is not None and len(runtimes) != 1))


def openmp_runtimes() -> list[str] | None:
    """Return the OpenMP libraries mapped into this process; None where the system has no list."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    files = {line.split()[-1] for line in maps.read_text().splitlines()}
    return sorted(
        file for file in files if Path(file).name.startswith(("libgomp", "libomp", "libiomp"))
    )


if __name__ == "__main__":
    sys.exit(main())
