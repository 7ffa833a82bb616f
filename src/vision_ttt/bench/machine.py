"""The machine, the versions and the command of a measurement."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

from vision_ttt.bench.rows import Run
from vision_ttt.engine.logs import versions
from vision_ttt.ops._native import instruction_set

# The files that a measurement depends on. Changed results and pages do not make a commit dirty.
_SOURCES = (":/src", ":/csrc", ":/setup.py", ":/pyproject.toml")

# Environment variables that affect a measurement: their names or prefixes.
_ENVIRONMENT = (
    *("VISION_TTT_", "OMP_", "GOMP_", "KMP_", "MKL_NUM", "LD_PRELOAD", "MALLOC_"),
    *("ATEN_CPU_CAPABILITY", "DNNL_", "ONEDNN_", "MKL_ENABLE_INSTRUCTIONS", "GLIBC_TUNABLES"),
    *("THP_MEM_ALLOC_ENABLE", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "PYTORCH_ALLOC_CONF"),
    *("PYTORCH_CUDA_ALLOC_CONF", "TORCH_ALLOW_TF32", "NVIDIA_TF32_OVERRIDE", "TIMM_FUSED_ATTN"),
    "TRITON_INTERPRET",
)
# scikit-learn sets these in every process that imports it.
_NOT_THE_USERS = {"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE"}


def describe_run(argv: Sequence[str], device: torch.device) -> Run:
    """Record the machine, the versions and the command `argv`, which includes the program's name.

    The recorded command begins with the environment variables that affect the measurement.
    """
    version = versions()
    processor = processor_name()
    on_cuda = device.type == "cuda"
    driver, clocks = graphics_driver(device) if on_cuda else ("", "")
    return Run(
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=" ".join([*_environment(), shlex.join(argv)]),
        commit=commit(),
        processor=processor,
        cores=os.cpu_count() or 1,
        instruction_set=instruction_set() or "",
        threads=torch.get_num_threads(),
        device_name=torch.cuda.get_device_name(device) if on_cuda else processor,
        python=platform.python_version(),
        torch=version["torch"],
        timm=version["timm"],
        vision_ttt=version["vision-ttt"],
        cuda=torch.version.cuda or "" if on_cuda else "",
        driver=driver,
        clocks=clocks,
        triton=installed("triton") if on_cuda else "",
        flash_linear_attention=installed("flash-linear-attention") if on_cuda else "",
    )


def _environment() -> list[str]:
    """NAME=value, as in a shell, of the variables that affect a measurement."""
    affecting = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_ENVIRONMENT) and _NOT_THE_USERS.get(name) != value
    }
    return [f"{name}={shlex.quote(value)}" for name, value in sorted(affecting.items())]


def processor_name() -> str:
    """The processor's model name where the system reports it, else its architecture."""
    table = Path("/proc/cpuinfo")
    if table.exists():
        for line in table.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def graphics_driver(device: torch.device) -> tuple[str, str]:
    """The driver's version, and the GPU's clocks and power limit; empty if nvidia-smi fails.

    The clocks are the current and the highest.
    """
    fields = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    answer = _answer(
        "nvidia-smi",
        f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}",
        f"--query-gpu={fields}",
        "--format=csv,noheader",
    )
    if answer is None:
        return "", ""
    driver, clock, highest, memory, power = (cell.strip() for cell in answer.split(","))
    return driver, f"{clock} of {highest}, memory {memory}, at most {power}"


def installed(package: str) -> str:
    """The version of an optional package, or ""."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """The commit of this source tree, with "-dirty" where sources differ or are new, or "".

    An installed package may lie inside another project's repository, so a repository counts only if
    it tracks this file.
    """
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return ""
    head = _git("rev-parse", "HEAD") or ""
    return head + ("-dirty" if _git("status", "--porcelain", "--", *_SOURCES) else "")


def _git(*arguments: str) -> str | None:
    return _answer("git", *arguments, folder=Path(__file__).parent)


def _answer(*command: str, folder: Path | None = None) -> str | None:
    """A program's output, or None where the program is missing or fails."""
    try:
        answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:  # not installed
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
