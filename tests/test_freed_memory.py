"""keep_freed_memory, in processes of its own: it holds for a whole process."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch, vision_ttt
if "keep" in sys.argv:
    assert vision_ttt.keep_freed_memory()
def step():
    del [torch.ones(16, 2**20) for _ in range(4)][:]  # 64 MiB each, freed together
for _ in range(3):  # until the heap has its size
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*arguments: str) -> int:
    """The pages that the system clears for three steps."""
    call = [sys.executable, "-c", FAULTS, *arguments]
    return int(subprocess.run(call, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's switch")
def test_freed_memory_is_used_again_without_the_system():
    pages = 3 * 4 * 64 * 2**20 // 4096
    returned, kept = faults(), faults("keep")
    assert kept < pages // 20
    assert kept <= returned  # both few where the system has large pages


def test_other_systems_have_no_such_switch(monkeypatch):
    from vision_ttt import keep_freed_memory

    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False
