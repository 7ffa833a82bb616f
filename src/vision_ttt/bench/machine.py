"""Where and with what a measurement was made."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

from vision_ttt.bench.rows import Run
from vision_ttt.engine.logs import versions
from vision_ttt.ops._native import instruction_set


def describe_run(argv: Sequence[str], device: torch.device) -> Run:
    """Record the machine, the versions and the command `argv` (its program's name included)."""
    version = versions()
    processor = processor_name()
    return Run(
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=shlex.join(argv),
        commit=commit(),
        processor=processor,
        cores=os.cpu_count() or 1,
        instruction_set=instruction_set() or "",
        threads=torch.get_num_threads(),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        python=platform.python_version(),
        torch=version["torch"],
        timm=version["timm"],
        vision_ttt=version["vision-ttt"],
    )


def processor_name() -> str:
    """The processor as its maker calls it, where the system tells, else its architecture."""
    table = Path("/proc/cpuinfo")
    if table.exists():
        for line in table.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit that this source is of, with "-dirty" where tracked files differ, or "".

    An installed package may lie inside somebody else's repository: only one that tracks this very
    file is asked.
    """
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name)
    return "" if tracked is None else _git("describe", "--always", "--dirty", "--abbrev=40") or ""


def _git(*arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:  # git is not installed
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
