"""The memory that a block keeps for the backward pass."""

import pytest
import torch

from tolerances import assert_close
from vision_ttt import for_training
from vision_ttt.layers import TTTLinear, VitttBlock, VitttMixer
from vision_ttt.ops import use_backend

VITTT = {"bidirectional": True, "share_qk": True, "conv_kernel_size": 4, "gate": True}


def make_block(dim=64, hidden=176):
    torch.manual_seed(0)
    return VitttBlock(VitttMixer(dim, ttt=TTTLinear(dim, dim // 32, **VITTT)), dim, hidden)


def kept_per_token(block, x, grid):
    """Numbers per token that autograd keeps of a block, its parameters apart, in units of D."""
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(x, grid)
    assert out.requires_grad
    return sum(storages.values()) / x.numel() / 4


@pytest.mark.parametrize("composite", [False, True])
def test_training_keeps_each_stage_once(composite):
    block, grid = make_block(), (20, 30)
    if composite:
        for_training(block, strict=True)
    x = torch.randn(1, 600, 64, requires_grad=True)
    # Inputs of Conv2d and both norms, the first one's output, that of the merge: 5; projections: 5;
    # both directions' outputs: 2; states and rates: below 1. Unless they are an op's own, the
    # second norm's output, both directions' convolved q and k, 4, and pre-activations and
    # activation, 3 · 176 / 64.
    wanted = 5 + 5 + 2 + (0 if composite else 1 + 4 + 3 * 176 / 64)
    assert wanted <= kept_per_token(block, x, grid) < wanted + 1


def test_training_gradients_survive_the_recomputation():
    block, x = for_training(make_block(), strict=True), torch.randn(2, 24, 64)
    x.requires_grad_()
    loss = block(x, (4, 6)).square().sum()
    gradients = torch.autograd.grad(loss, [x, *block.parameters()])
    exact = make_block().double()  # of modules
    exact.load_state_dict(block.state_dict())
    y = x.detach().double().requires_grad_()
    z = exact(y, (4, 6))
    wanted = torch.autograd.grad(z.square().sum(), [y, *exact.parameters()])
    for got, other in zip(gradients, wanted, strict=True):
        assert_close(got, other, 5e-5)


@pytest.mark.parametrize("backend", ["cpu", "dual"])
def test_inference_computes_what_training_does(backend):
    block, x = make_block(), torch.randn(2, 24, 64)
    with torch.no_grad():  # a new block adds little to what it is given
        for parameter in block.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    before = x.clone()
    with use_backend(backend):
        wanted = block(x, (4, 6))
        with torch.no_grad():
            assert_close(block(x, (4, 6)), wanted, 1e-6)
        with torch.inference_mode():
            assert_close(block(x, (4, 6)), wanted, 1e-6)
    assert torch.equal(x, before)


def test_autocast_keeps_the_residual_stream_in_float32():
    block, x = make_block(), 100 * torch.randn(1, 24, 64)
    torch.nn.init.zeros_(block.mixer.conv2d.weight)  # its own rounding would hide that of the sum
    wanted = block(x, (4, 6)) - x
    for training in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(training):
            got = block(x, (4, 6))
        assert got.dtype == torch.float32
        assert_close(got - x, wanted, 3e-2)


@pytest.mark.parametrize("name", ["mixer.conv2d", "mixer.ttt.in_proj", "mlp.fc1", "mlp.fc2", "mlp"])
def test_one_hook_alone_sees_what_its_module_computed(name):
    block, x, seen = make_block(), torch.randn(1, 24, 64), []
    with torch.no_grad():
        block.get_submodule(name).register_forward_hook(
            lambda module, inputs, output: seen.append((output, output.clone()))
        )
        block(x, (4, 6))
    ((output, at_the_time),) = seen
    assert torch.equal(output, at_the_time)
