"""The inputs that the Triton backend refuses."""

import pytest
import torch

from ttt_linear_problems import OP


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
        ({"dim": 32, "norm": None}, None),
        ({"dim": 64, "norm": None}, "without a norm, head dimension 64 is not one of"),
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
    norm = changes.get("norm", torch.ones(3, 64))
    inputs = OP.inputs(*[None] * OP.width)._replace(q=Views(), ln_weight=norm, mini_batch_size=size)
    got = OP.backends["triton"].refusal(inputs)
    assert got is None if reason is None else got.startswith(reason)
