"""Mamba in both directions, against the released mixer and against its equations."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tolerances import assert_close
from vision_ttt import for_training
from vision_ttt.layers import BidirectionalMamba, MambaBlock
from vision_ttt.ops import _native

GOLDEN = Path(__file__).parents[1] / "golden" / "mamba_bi_mixer"
STACKED = {  # our parameter → the release's of the forward and of the backward direction
    "conv.weight": ("conv1d.weight", "conv1d_b.weight"),
    "conv.bias": ("conv1d.bias", "conv1d_b.bias"),
    "x_proj": ("x_proj.weight", "x_proj_b.weight"),
    "dt_proj": ("dt_proj.weight", "dt_proj_b.weight"),
    "dt_bias": ("dt_proj.bias", "dt_proj_b.bias"),
    "A_log": ("A_log", "A_b_log"),
    "D": ("D", "D_b"),
}
SHARED = ("in_proj.weight", "out_proj.weight")


def released(tensors, prefix):
    """Ours from a release's tensors, whose names begin with the prefix."""
    stacked = {
        ours: torch.cat([tensors[prefix + name] for name in theirs])
        for ours, theirs in STACKED.items()
    }
    return stacked | {name: tensors[prefix + name] for name in SHARED}


def mixer(dim=32, **options):
    torch.manual_seed(0)
    return BidirectionalMamba(dim, **options)


def test_released_mixer():
    tensors = load_file(GOLDEN.with_suffix(".safetensors"))
    tolerance = json.loads(GOLDEN.with_suffix(".json").read_text())["tolerance"]
    layer = BidirectionalMamba(64)
    own = layer.state_dict()
    weights = released(tensors, "weights.")
    layer.load_state_dict({name: x.view_as(own[name]) for name, x in weights.items()})
    x = tensors["input.x"].requires_grad_()
    y = layer(x)
    assert_close(y, tensors["output.y"], tolerance["forward"], "y")
    (y * tensors["input.proj_y"]).sum().backward()
    assert_close(x.grad, tensors["output.grad.input.x"], tolerance["gradients"], "x")
    wanted = released(tensors, "output.grad.")
    assert wanted.keys() == dict(layer.named_parameters()).keys()
    for name, parameter in layer.named_parameters():
        gradient = wanted[name].view_as(parameter)
        assert_close(parameter.grad, gradient, tolerance["gradients"], name)


def one_direction(layer, x, index):
    """scan(x) of the equations [B, T, E], token by token, of the sequence as it is given."""
    e, n, r = layer.inner, layer.state, layer.rank
    own = slice(index * e, (index + 1) * e)
    taps = layer.conv.weight[own, 0]
    padded = F.pad(x, (0, 0, taps.shape[1] - 1, 0))
    u = sum(padded[:, j : j + x.shape[1]] * taps[:, j] for j in range(taps.shape[1]))
    u = F.silu(u + layer.conv.bias[own])
    rank, b, c = F.linear(u, layer.x_proj[index]).split([r, n, n], dim=-1)
    delta = F.softplus(F.linear(rank, layer.dt_proj[index], layer.dt_bias[own]))
    a = -torch.exp(layer.A_log[own])
    h, outputs = torch.zeros(len(x), e, n, dtype=x.dtype), []
    for t in range(x.shape[1]):
        update = (delta[:, t] * u[:, t])[..., None] * b[:, t, None]
        h = torch.exp(delta[:, t, :, None] * a) * h + update
        outputs.append((h * c[:, t, None]).sum(-1) + layer.D[own] * u[:, t])
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("length", [1, 2, 5, 70])
@pytest.mark.parametrize(
    "options",
    [{}, {"state": 3, "expand": 1, "conv_kernel_size": 2, "dt_rank": 5}, {"expand": 3}],
    ids=str,
)
def test_the_equations(options, length):
    layer = mixer(24, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    x = torch.randn(2, length, 24, dtype=torch.float64)
    inner, z = layer.in_proj(x).chunk(2, dim=-1)
    backward = one_direction(layer, inner.flip(1), 1).flip(1)
    y = (one_direction(layer, inner, 0) + backward) / 2 * F.silu(z)
    assert_close(layer(x), layer.out_proj(y), 1e-11)


def test_each_direction_sees_its_side_only():
    """With the other direction's output removed, a token depends on none of the other side."""
    x = torch.randn(1, 9, 32, requires_grad=True)
    for index, seen in enumerate((range(6), range(5, 9))):
        layer = mixer()
        inner = layer.inner
        with torch.no_grad():  # without taps and bias the other direction's u is zero
            other = slice((1 - index) * inner, (2 - index) * inner)
            layer.conv.weight[other] = 0
            layer.conv.bias[other] = 0
        (gradient,) = torch.autograd.grad(layer(x)[:, 5].sum(), x)
        assert gradient[0].abs().sum(-1).nonzero().flatten().tolist() == list(seen)


def test_initial_steps_and_rates():
    layer = mixer(128, dt_range=(0.01, 0.2))
    dt = F.softplus(layer.dt_bias)
    assert dt.min() >= 0.01 * (1 - 1e-4)
    assert dt.max() <= 0.2 * (1 + 1e-4)
    assert dt.log().mean().item() == pytest.approx(math.log(0.01 * 0.2) / 2, abs=0.15)
    rates = torch.arange(1.0, 17).expand(512, 16)
    torch.testing.assert_close(layer.A_log.exp(), rates)
    assert (layer.D == 1).all()
    assert layer.no_weight_decay() == {"A_log", "D", "dt_bias"}
    assert layer.dt_proj.shape[-1] == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_inputs_and_mixed_precision(dtype):
    """Inputs a hundred times as large as a norm's: finite, and near what float64 gives."""
    block, x = MambaBlock(32), 100 * torch.randn(2, 300, 32)
    exact = block.double()(x.double())
    block.float()
    with torch.autocast("cpu", dtype):
        y, mixed = block(x), block.mixer(x if dtype == torch.bfloat16 else x / 10)
    assert y.dtype == torch.float32
    assert_close(y - x, exact - x, 2e-2)  # of the branch, which is a thousandth of the sum
    assert mixed.dtype == dtype
    assert mixed.isfinite().all()
    mixed.float().square().mean().backward()
    for name, parameter in block.mixer.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all(), name


def test_block_is_its_description():
    block = MambaBlock(16).double()
    torch.nn.init.normal_(block.norm.weight)
    x = 1e-2 * torch.randn(2, 5, 16, dtype=torch.float64)  # where ε counts
    normal = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * block.norm.weight
    assert_close(block(x) - x, block.mixer(normal), 1e-11)


def test_the_tokens_are_not_written_to():
    block, x = MambaBlock(16), torch.randn(1, 5, 16)
    before = x.clone()
    block(x, (1, 5), (2,))
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state": 0}, "state must be at least 1, got 0"),
        ({"expand": 0}, "expand must be at least 1, got 0"),
        ({"conv_kernel_size": 0}, "conv_kernel_size must be at least 1, got 0"),
        ({"dt_rank": 0}, "dt_rank must be at least 1, got 0"),
        ({"dt_range": (0, 0.1)}, "dt_range must be two ascending numbers above 0"),
        ({"dt_range": (0.2, 0.1)}, "dt_range must be two ascending numbers above 0"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BidirectionalMamba(16, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_for_training_makes_the_same_layer(dtype):
    """By kernels in float32, and by other ops where there are none."""
    torch.manual_seed(0)
    plain = BidirectionalMamba(32)
    composite = for_training(copy.deepcopy(plain), strict=True)
    results = []
    for layer in (plain, composite):
        layer.to(dtype)
        x = torch.linspace(-2, 2, 2 * 70 * 32, dtype=dtype).view(2, 70, 32).requires_grad_()
        y = layer(x)
        (y * torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)).sum().backward()
        results.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for got, wanted in zip(*reversed(results), strict=True):
        assert_close(got, wanted, 2e-5)


@pytest.mark.skipif(_native.LIBRARY is None, reason="not compiled")
def test_for_training_keeps_less_for_the_backward_pass():
    def kept(layer):
        sizes = {}
        weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}

        def pack(x):
            storage = x.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = layer(torch.randn(1, 640, 64, requires_grad=True))  # noqa: F841, holds the graph
            return sum(size for address, size in sizes.items() if address not in weights)

    # The input, x and z, a state per 64 tokens, and the input of the output projection.
    numbers = 640 * (64 + 2 * 128 + 2 * 128 * 16 // 64 + 128)
    assert kept(for_training(BidirectionalMamba(64))) <= 4.1 * numbers
    assert kept(BidirectionalMamba(64)) > 12 * numbers
