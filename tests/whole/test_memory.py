"""The memory that is given is the most that a process takes."""

import subprocess
import sys
from pathlib import Path

import pytest

_RUN = """
import sys, numpy, timm, torch
from pathlib import Path
from vision_ttt.whole import ArrayPicture, Normalisation, WholePictures

model = timm.create_model("vittt_nano_patch4_32", dynamic_img_size=True)
pixels = numpy.lib.format.open_memmap(sys.argv[1], "w+", numpy.uint8, (2048, 2048, 3))
pixels.flush()
picture = ArrayPicture(numpy.load(sys.argv[1], mmap_mode="r"), Normalisation([0.5] * 3, [0.2] * 3))
whole = WholePictures(model, memory="1GiB", scratch=sys.argv[2])
rows = sum(len(tokens) for _, tokens in whole.tokens(picture))
peak = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
print(rows, int(peak.split()[1]) * 1024, whole.plan((2048, 2048)).scratch)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells the peak")
def test_a_run_keeps_to_its_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _RUN, str(tmp_path / "p.npy"), str(tmp_path / "scratch")]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows, peak, scratch = map(int, told.split())
    assert rows == 512
    assert peak <= 2**30
    assert scratch > 190 * 2**20  # in memory the tokens alone would take as much
