"""The Vittt block against a plain transcription of the paper, and used alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tolerances import FORWARD, assert_close
from vision_ttt import TTTLinear, VitttBlock, VitttMixer
from vision_ttt.ops import ttt_linear


def transcription(block: VitttBlock, y, grid, dim, heads):
    """Algorithm 1 and Eq. 9 written down plainly: two directions one after the other, the back one
    on a flipped sequence, the primal op; weights read from the block."""
    mixer, ttt = block.mixer, block.mixer.ttt
    d = dim // heads
    batch, length = y.shape[:2]
    image = y.transpose(1, 2).reshape(batch, dim, *grid)
    y = y + F.conv2d(image, mixer.conv2d.weight, padding=1, groups=dim).flatten(2).transpose(1, 2)
    x = F.layer_norm(y, (dim,), mixer.norm.weight, mixer.norm.bias, 1e-6)
    w_k, w_v, w_gate = ttt.in_proj.weight.split([2 * dim, 2 * dim, dim])
    learner = ttt.learner
    z = 0
    for direction in range(2):
        channels = slice(direction * dim, (direction + 1) * dim)
        own = slice(direction * heads, (direction + 1) * heads)
        s = x.flip(1) if direction else x

        def conv(t, module, channels=channels):
            padded = F.pad(t.transpose(1, 2), (3, 0))
            weight, bias = module.weight[channels], module.bias[channels]
            return F.conv1d(padded, weight, bias, groups=dim).transpose(1, 2).contiguous()

        kq = s @ w_k[channels].T
        k, q = conv(kq, ttt.conv_k), conv(kq, ttt.conv_q)
        v = s @ w_v[channels].T
        eta = torch.sigmoid(s @ ttt.rate_proj.weight[own].T + ttt.rate_proj.bias[own]) / d
        offset = learner.position_offset[direction]
        scale = (1 / torch.arange(1, 17, dtype=y.dtype) + offset).clamp(min=0)
        out = ttt_linear(
            *(t.reshape(batch, length, heads, d) for t in (q, k, v)),
            eta,
            learner.w0[own],
            learner.b0[own],
            learner.norm_weight[own],
            learner.norm_bias[own],
            position_scale=scale,
            backend="reference",
        ).reshape(batch, length, dim)
        norm = ttt.merge
        out = F.layer_norm(out, (dim,), norm.weight[direction], norm.bias[direction], 1e-6)
        z = z + (out.flip(1) if direction else out)
    y = y + (F.gelu(x @ w_gate.T) * z) @ ttt.out_proj.weight.T
    x = F.layer_norm(y, (dim,), block.norm.weight, block.norm.bias, 1e-6)
    gate, value = (x @ block.mlp.fc1.weight.T).chunk(2, dim=-1)
    return y + (F.silu(gate) * value) @ block.mlp.fc2.weight.T


@pytest.fixture
def block():
    torch.manual_seed(0)
    block = VitttBlock(VitttMixer(16, 2), 16, 24).double()
    with torch.no_grad():  # no parameter at a value that hides it
        for parameter in block.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return block


def test_block_is_the_papers(block):
    y = torch.randn(2, 35, 16, dtype=torch.float64)
    assert_close(block(y, (5, 7)), transcription(block, y, (5, 7), 16, 2), 1e-12)


def test_every_parameter_of_the_block_is_used(block):
    block(torch.randn(2, 35, 16, dtype=torch.float64), (5, 7)).square().sum().backward()
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("share_qk", [False, True])
@pytest.mark.parametrize("extras", [{}, {"conv_kernel_size": 4, "gate": True}])
def test_ttt_linear_layer_in_every_design(bidirectional, share_qk, extras):
    layer = TTTLinear(12, 3, bidirectional=bidirectional, share_qk=share_qk, **extras).double()
    x = torch.randn(2, 21, 12, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    assert y.shape == x.shape
    (gradient,) = torch.autograd.grad(y[0, 10].sum(), x)
    later, earlier = gradient[0, 11:].abs().sum(), gradient[0, :10].abs().sum()
    assert earlier > 0
    assert (later > 0) == bidirectional
    assert gradient[1].abs().sum() == 0


@pytest.mark.parametrize("share_qk", [False, True])
def test_causal_layer_is_its_description(share_qk):
    """The bare layer of Table 3: projections, rates, op, post norm, output; options in use."""
    torch.manual_seed(0)
    layer = TTTLinear(12, 3, share_qk=share_qk, mini_batch_size=5, base_learning_rate=3.0).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x = torch.randn(2, 13, 12, dtype=torch.float64)
    k, *q, v = (x @ w.T for w in layer.in_proj.weight.split(12))
    q = q[0] if q else k
    eta = x @ layer.rate_proj.weight.T + layer.rate_proj.bias
    learner = layer.learner
    z = ttt_linear(
        *(t.unflatten(-1, (3, 4)) for t in (q, k, v)),
        3.0 * torch.sigmoid(eta) / 4,
        *(learner.w0, learner.b0, learner.norm_weight, learner.norm_bias),
        mini_batch_size=5,
        position_scale=(1 / torch.arange(1, 6).double() + learner.position_offset[0]).clamp(min=0),
        backend="reference",
    ).flatten(2)
    z = F.layer_norm(z, (12,), layer.merge.weight[0], layer.merge.bias[0], 1e-6)
    assert_close(layer(x), z @ layer.out_proj.weight.T, 1e-12)


def test_rates_and_position_scale_are_float32_in_low_precision():
    layer = TTTLinear(32, 2).bfloat16()
    problem = layer.inner_problem(torch.randn(1, 20, 32, dtype=torch.bfloat16))
    assert problem["q"].dtype == torch.bfloat16
    assert problem["eta"].dtype == problem["position_scale"].dtype == torch.float32


def test_mixer_takes_heads_or_a_layer_of_its_own():
    own = TTTLinear(32, 4, bidirectional=True)
    assert VitttMixer(32, ttt=own).ttt is own
    for arguments in ({}, {"num_heads": 4, "ttt": own}):
        with pytest.raises(ValueError, match="give num_heads or ttt, one of them"):
            VitttMixer(32, **arguments)


def test_ttt_linear_layer_lifted_into_another_model():
    """As in the README: PyTorch's encoder layer with its attention replaced."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(32)
            self.mixer = TTTLinear(32, 4, bidirectional=True)

        def forward(self, x):
            return x + self.mixer(self.norm(x))

    model = Encoder()
    x = torch.randn(2, 50, 32)
    compiled = torch.compile(model, fullgraph=True)
    loss, compiled_loss = model(x).square().mean(), compiled(x).square().mean()
    assert_close(compiled_loss, loss, 1e-5)
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    got = torch.autograd.grad(compiled_loss, list(model.parameters()))
    for name, a, b in zip(dict(model.named_parameters()), got, wanted, strict=True):
        assert_close(a, b, 1e-4, name)


def test_vittt_mixer_lifted_out():
    mixer = VitttMixer(32, 2)
    x = torch.randn(2, 6 * 9, 32)
    assert mixer(x, (6, 9)).shape == x.shape
    with pytest.raises(ValueError, match="54 tokens do not fill a grid of 6 × 8"):
        mixer(x, (6, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_stays_close_to_float32_and_finite(dtype):
    torch.manual_seed(0)
    mixer = VitttMixer(64, 2)
    x = torch.randn(2, 200, 64)
    for convolution in (1, 0):  # its own rounding would hide that of TTT
        mixer.conv2d.weight.data.mul_(convolution)
        wanted = mixer(x, (10, 20))
        with torch.autocast("cpu", dtype=dtype):
            got = mixer(x, (10, 20))
        assert_close(got - x, wanted - x, 7e-3 if convolution else 2e-2)
    got.float().square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in mixer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_whole_module_in_half_precision(block, dtype):
    block, x = block.to(dtype), torch.randn(1, 40, 16, dtype=dtype)
    y = block(x, (5, 8))
    assert y.dtype == dtype
    for parameter in block.mixer.conv2d.parameters():
        parameter.data.zero_()  # the rounding of its sum would hide the branches
    y, wanted = block(x, (5, 8)), block.double()(x.double(), (5, 8))
    assert_close(y - x, wanted - x, 4 * FORWARD[dtype])


def test_dimension_must_divide_into_heads():
    with pytest.raises(ValueError, match="dim must be a multiple of num_heads, got 10 and 3"):
        TTTLinear(10, 3)


def test_misspelt_options_are_refused():
    with pytest.raises(TypeError, match="minibatch"):
        TTTLinear(12, 3, minibatch=4)
