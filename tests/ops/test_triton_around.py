"""The Triton kernels without a GPU: interpreted, each file in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "file", ["test_every_op", "triton_interpreted_convolutions", "triton_interpreted_pointwise"]
)
def test_interpreted(file):
    pytest.importorskip("triton")
    path = Path(__file__).with_name(f"{file}.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(
        [*command, str(path)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


def test_the_kernels_are_not_imported_before_they_are_needed():
    code = "import sys, vision_ttt\nprint([m for m in sys.modules if 'triton_kernels' in m])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
