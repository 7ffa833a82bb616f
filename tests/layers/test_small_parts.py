"""Convolutions and the inner learner, each against its plain description."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tolerances import assert_close
from vision_ttt.layers import DepthwiseConv2d, DirectionalConv1d, LinearLearner
from vision_ttt.ops import depthwise_conv2d, residual_depthwise_conv2d


@pytest.mark.parametrize("length", [1, 3, 20])
def test_directional_conv1d_is_a_causal_convolution_each_way(length):
    conv = DirectionalConv1d(6, 4, reverse_channels=2).double()
    x = torch.randn(2, length, 6, dtype=torch.float64)
    y = conv(x)
    for channel in range(6):
        sequence = x[:, :, channel].flip(1) if channel >= 4 else x[:, :, channel]
        padded = F.pad(sequence, (3, 0))
        taps = conv.weight[channel, 0]
        wanted = torch.stack([padded[:, t : t + 4] @ taps for t in range(length)], 1)
        wanted = wanted + conv.bias[channel]
        assert_close(y[:, :, channel], wanted.flip(1) if channel >= 4 else wanted, 1e-12)


def test_directional_conv1d_keeps_the_last_axis_contiguous():
    assert DirectionalConv1d(8, 4, 4)(torch.randn(2, 5, 8)).is_contiguous()


def test_directional_conv1d_refuses_too_many_reverse_channels():
    with pytest.raises(ValueError, match=r"reverse_channels must be in 0 … 4, got 5"):
        DirectionalConv1d(4, 4, reverse_channels=5)


@pytest.mark.parametrize("grid", [(4, 7), (1, 5), (6, 1)])
def test_depthwise_conv2d_is_conv2d_on_the_grid(grid):
    conv = DepthwiseConv2d(5).double()
    x = torch.randn(2, grid[0] * grid[1], 5, dtype=torch.float64)
    image = x.transpose(1, 2).reshape(2, 5, *grid)
    wanted = F.conv2d(image, conv.weight, padding=1, groups=5).flatten(2).transpose(1, 2)
    assert_close(conv(x, grid), wanted, 1e-12)


@pytest.mark.parametrize("extra", [(0,), (6,), (0, 13), (3, 7, 11), (12, 13, 14)])
def test_depthwise_conv2d_leaves_extra_tokens_out(extra):
    conv = DepthwiseConv2d(5).double()
    image = torch.randn(2, 12, 5, dtype=torch.float64, requires_grad=True)
    tokens = image
    for position in extra:
        one = torch.full((2, 1, 5), 99.0, dtype=torch.float64)
        tokens = torch.cat([tokens[:, :position], one, tokens[:, position:]], dim=1)
    y, wanted = conv(tokens, (3, 4), extra), conv(image, (3, 4))
    rest = [t for t in range(tokens.shape[1]) if t not in extra]
    assert_close(y[:, rest], wanted, 1e-12)
    assert (y[:, list(extra)] == 0).all()
    gradients = [torch.autograd.grad(x.square().sum(), image)[0] for x in (y, wanted)]
    assert_close(*gradients, 1e-12)


def test_depthwise_conv2d_refuses_a_grid_that_does_not_fit():
    with pytest.raises(ValueError, match="10 tokens do not fill a grid of 3 × 4"):
        DepthwiseConv2d(4)(torch.zeros(1, 10, 4), (3, 4))


def test_depthwise_conv2d_refuses_an_even_kernel():
    with pytest.raises(ValueError, match="kernel_size must be odd, got 4"):
        DepthwiseConv2d(4, 4)


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("grid", [(4, 7), (1, 5), (6, 1), (2, 2)])
def test_residual_is_a_tap_at_the_centre(kernel, grid):
    torch.manual_seed(0)
    x = torch.randn(2, grid[0] * grid[1], 32, requires_grad=True)
    weight = torch.randn(32, 1, kernel, kernel, requires_grad=True)
    results = []
    for y in (x + depthwise_conv2d(x, weight, grid), residual_depthwise_conv2d(x, weight, grid)):
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, weight])])
    for wanted, got in zip(*results, strict=True):
        assert_close(got, wanted, 2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_residual_keeps_the_digits_of_a_short_weight(dtype):
    x, weight = torch.randn(1, 12, 32, dtype=dtype), 1e-3 * torch.randn(32, 1, 3, 3, dtype=dtype)
    wanted = x + depthwise_conv2d(x, weight, (3, 4))
    assert torch.equal(residual_depthwise_conv2d(x, weight, (3, 4)), wanted)


def test_residual_is_not_rounded_under_autocast():
    x, weight = torch.randn(1, 12, 32), torch.randn(32, 1, 3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = residual_depthwise_conv2d(x, weight, (3, 4))
        assert torch.equal(y, x + depthwise_conv2d(x, weight, (3, 4)))


def test_residual_refuses_what_is_no_tensor():
    with pytest.raises(TypeError, match="x must be a tensor, got float"):
        residual_depthwise_conv2d(1.0, torch.ones(4, 1, 3, 3), (2, 2))


@pytest.mark.parametrize(("states", "learnt"), [(2, 2), (1, 1), (0, 0), (None, 2)])
def test_learnable_states(states, learnt):
    learner = LinearLearner(3, 4, directions=2, learnable_states=states, eps=0.5)
    names = dict(learner.named_parameters())
    assert ("w0" in names) == (learnt > 0)
    assert len(learner.w0) == 3 * (learnt or 2)
    problem = learner.problem(*torch.randn(3, 1, 5, 6, 4), torch.rand(1, 5, 6))
    assert problem["w0"].shape == (6, 4, 4)
    assert problem["eps"] == 0.5
    halves = problem["w0"].chunk(2)
    assert torch.equal(*halves) == (states == 1)
    # A state that is not learnt is saved and restored all the same.
    assert "w0" in learner.state_dict()


def test_shared_state_learns_from_both_directions():
    learner = LinearLearner(1, 4, directions=2, learnable_states=1).double()
    q, k, v = torch.randn(3, 1, 5, 2, 4, dtype=torch.float64)
    z = learner(q, k, v, torch.rand(1, 5, 2, dtype=torch.float64))
    gradients = [torch.autograd.grad(z[:, :, h].sum(), learner.w0, retain_graph=True)[0]
                 for h in range(2)]  # fmt: skip
    (both,) = torch.autograd.grad(z.sum(), learner.w0)
    assert all(g.abs().sum() > 0 for g in gradients)
    assert_close(both, gradients[0] + gradients[1], 1e-12)


def test_position_scale_is_one_over_j_plus_offset_and_never_negative():
    learner = LinearLearner(2, 4, mini_batch_size=4, directions=2)
    assert_close(learner.position_scale()[0], 1 / torch.arange(1, 5), 1e-7)
    with torch.no_grad():
        learner.position_offset[1] = torch.tensor([-2.0, 0.5, 0, 0])
    scale = learner.position_scale()
    assert scale.shape == (2, 4)
    assert torch.equal(scale[1], torch.tensor([0, 1, 1 / 3, 1 / 4]))
    q = torch.randn(1, 3, 4, 4)
    of_heads = learner.problem(q, q, q, q[..., 0])["position_scale"]
    assert torch.equal(of_heads, scale[[0, 0, 1, 1]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directions": 3}, "directions must be 1 or 2, got 3"),
        ({"learnable_states": 2}, r"learnable_states must be in 0 … 1 .* got 2"),
        ({"mini_batch_size": 0}, "mini_batch_size must be at least 1, got 0"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
    ],
)
def test_learner_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        LinearLearner(**{"num_heads": 2, "head_dim": 4, **options})


def test_the_position_scale_stays_where_it_is_while_parameters_are_on_meta():
    """As they are while they are offloaded to a disk."""
    learner = LinearLearner(2, 4, mini_batch_size=4)
    learner.position_offset = nn.Parameter(learner.position_offset.to("meta"))
    learner.init_non_persistent_buffers()
    assert learner.inverse_steps.tolist() == [1, 1 / 2, learner.inverse_steps[2].item(), 1 / 4]
    made = LinearLearner(2, 4, mini_batch_size=4).to("meta")
    assert made.inverse_steps.is_meta
    made.position_offset = nn.Parameter(torch.zeros(1, 4))
    made.init_non_persistent_buffers()
    assert not made.inverse_steps.is_meta


def test_learner_does_not_change_in_a_forward_pass():
    learner = LinearLearner(2, 4, directions=2, learnable_states=0)
    before = {name: x.clone() for name, x in learner.state_dict().items()}
    learner(*torch.randn(3, 1, 50, 4, 4), torch.rand(1, 50, 4))
    assert all(torch.equal(before[name], x) for name, x in learner.state_dict().items())
    assert isinstance(learner, nn.Module)
