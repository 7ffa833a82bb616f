"""The Triton kernels without a GPU: interpreted, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PYTORCH = "ttt_linear and not values_and_gradients"
"""What PyTorch makes of an op whose kernels the interpreter takes seconds for."""


@pytest.mark.parametrize(
    ("files", "cases"),
    [
        (["test_every_op"], f"not ({PYTORCH})"),
        pytest.param(["test_every_op"], PYTORCH, marks=pytest.mark.slow),
        (["triton_interpreted_convolutions", "triton_interpreted_pointwise"], ""),
    ],
    ids=["every op", "ttt_linear in PyTorch", "around"],
)
def test_interpreted(files, cases):
    pytest.importorskip("triton")
    paths = [str(Path(__file__).with_name(f"{file}.py")) for file in files]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(
        [*command, *paths, "-k", cases],
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
