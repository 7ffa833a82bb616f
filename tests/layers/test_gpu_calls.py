"""The operations of a block on a GPU, recorded without one: fake tensors compute shapes only."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from vision_ttt import VitttBlock, VitttMixer
from vision_ttt.ops import use_backend

KERNELS = ["depthwise_conv2d", "directional_conv1d", "ttt_linear", "gated_norm", "swiglu"]


TOKENS = (2, 35, 64)


class Recorder(TorchDispatchMode):
    """The operations that write a tensor as large as the tokens."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        tensors = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        if any(x.numel() >= math.prod(TOKENS) for x in tensors):
            self.calls.append(str(function).removesuffix(".default"))
        return out


def calls_on_a_gpu(backend=None, parameters=torch.bfloat16, tokens=torch.bfloat16):
    block = VitttBlock(VitttMixer(64, 2), 64, 96)
    with FakeTensorMode(), torch.no_grad(), use_backend(backend), Recorder() as recorder:
        for module in block.modules():
            for name, parameter in module.named_parameters(recurse=False):
                fake = torch.empty(parameter.shape, dtype=parameters, device="cuda")
                setattr(module, name, nn.Parameter(fake))
            for name, x in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty(x.shape, dtype=x.dtype, device="cuda"))
        recorder.calls.clear()
        y = block(torch.empty(TOKENS, dtype=tokens, device="cuda"), (5, 7))
    assert y.shape == TOKENS
    return recorder.calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_stand_for_everything_between_the_products(dtype):
    calls = calls_on_a_gpu(parameters=dtype, tokens=dtype)
    own = [call.removeprefix("vision_ttt.") for call in calls if call.startswith("vision_ttt.")]
    convolution2d, convolution1d, *others = KERNELS
    assert own == [convolution2d, convolution1d, convolution1d, *others]
    slow = ("convolution", "cat", "constant_pad_nd", "gelu", "silu", "clone", "copy_")
    assert not [call for call in calls if call.removeprefix("aten.") in slow]


@pytest.mark.parametrize(
    ("backend", "dtype"), [("dual", torch.bfloat16), (None, torch.float64)], ids=str
)
def test_or_pytorch_alone_where_that_is_asked_for_or_the_dtype_is_not_theirs(backend, dtype):
    calls = calls_on_a_gpu(backend, parameters=dtype, tokens=dtype)
    assert {call for call in calls if call.startswith("vision_ttt.")} == {"vision_ttt.ttt_linear"}
    assert "aten.convolution" in calls
