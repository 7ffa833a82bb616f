"""What ptxas made of a kernel that Triton compiled for a GPU, which need not be there."""

import re
import subprocess
from typing import NamedTuple

import triton


class Usage(NamedTuple):
    """What one program of a compiled kernel needs."""

    registers: int
    stack: int
    shared: int
    machine_code: str


def usage_of(compiled, directory) -> Usage:
    """Read a compiled kernel's binary, which is written to ``directory``."""
    path = directory / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    report = _tool("cuobjdump", "-res-usage", path)
    registers, stack = (int(re.search(rf"{x}:(\d+)", report)[1]) for x in ("REG", "STACK"))
    return Usage(registers, stack, compiled.metadata.shared, _tool("nvdisasm", path))


def check_unspilled(found: Usage) -> None:
    """Assert that a thread keeps all it needs in its registers."""
    assert found.stack == 0, f"{found.stack} bytes of a thread's registers are spilled"
    assert not re.search(r"\b(LDL|STL)\b", found.machine_code)


def _tool(name: str, *arguments: object) -> str:
    command = [getattr(triton.knobs.nvidia, name).path, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
