"""The Triton backend without a GPU: what it refuses, its import, its kernels interpreted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ttt_linear_problems import OP

GROUPS = {  # each a process of its own, so that pytest-xdist runs them side by side
    "gradients": "gradients and not strided",
    "the rest": "not gradients or strided",
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("cases", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_interpreted(group, cases):
    pytest.importorskip("triton")
    path = Path(__file__).with_name("triton_interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(
        [*command, str(path), "-k", GROUPS[group], "-m", cases],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    nothing = cases == "slow" and run.returncode == 5  # this group has no such case
    assert run.returncode == 0 or nothing, run.stdout[-8000:] + run.stderr[-2000:]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"device": "mps"}, "tensors are on mps"),
        ({"dtype": torch.float64}, "dtype torch.float64 is not one of"),
        ({"dim": 48}, "head dimension 48 is not one of"),
        ({"mini_batch_size": 1}, None),
        ({"mini_batch_size": 6400}, None),
        ({"dim": 128, "mini_batch_size": 64, "dtype": torch.float32}, None),
    ],
)
def test_refusals(changes, reason):
    class Views:
        """Stands in for a tensor on a device that this machine has not."""

        device = torch.device(changes.get("device", "cuda"))
        is_cuda, is_cpu = device.type == "cuda", False
        dtype = changes.get("dtype", torch.bfloat16)
        shape = (1, 20, 3, changes.get("dim", 64))

    size = changes.get("mini_batch_size", 16)
    inputs = OP.inputs(*[None] * OP.width)._replace(q=Views(), mini_batch_size=size)
    got = OP.refusal("triton", inputs)
    assert got is None if reason is None else got.startswith(reason)


def test_the_kernels_are_not_imported_before_they_are_needed():
    code = "import sys, vision_ttt\nprint([m for m in sys.modules if 'ttt_linear.triton_' in m])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "['vision_ttt.ops.ttt_linear.triton_backend']"
