"""Layers of one direction go on at any token: parts equal the whole."""

from functools import partial

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import vision_ttt
from tolerances import assert_close
from vision_ttt import for_training
from vision_ttt.layers import (
    TTTMLP,
    DirectionalConv1d,
    LinearLearner,
    MiniBatchRotary,
    TTTLayer,
    TTTLayerState,
    TTTLinear,
)
from vision_ttt.ops import states

LENGTH, DIM = 19, 32


def rotated() -> TTTLayer:
    learner = partial(LinearLearner, mini_batch_size=4)
    rotary = MiniBatchRotary(16, 4)
    return TTTLayer(DIM, 2, learner, share_qk=True, conv_kernel_size=3, gate=True, rotary=rotary)


LAYERS = {
    "linear": partial(TTTLinear, DIM, 2, mini_batch_size=4),
    "linear, all options": partial(
        TTTLinear, DIM, 2, mini_batch_size=4, share_qk=True, conv_kernel_size=4, gate=True
    ),
    "for training": lambda: for_training(
        TTTLinear(DIM, 2, mini_batch_size=4, share_qk=True, conv_kernel_size=4)
    ),
    "rotary": rotated,
    "mlp": partial(TTTMLP, DIM, 2, mini_batch_size=4, conv_kernel_size=2),
    "convolution": partial(DirectionalConv1d, DIM, 4),
}


def randomised(layer: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for x in layer.parameters():
            x.copy_(torch.randn_like(x) * (0.3 if x.ndim > 1 else 0.5))
    return layer.to(dtype)


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=8, deadline=None)
@given(cuts=st.sets(st.integers(1, LENGTH - 1), max_size=4).map(sorted))
def test_parts_equal_the_whole(name, cuts):
    """Outputs and all gradients."""
    layer = randomised(LAYERS[name]())
    x = torch.randn(2, LENGTH, DIM, dtype=torch.float64, requires_grad=True)
    wanted = layer(x)
    weights = torch.randn_like(wanted)
    leaves = [x, *layer.parameters()]
    gradients = torch.autograd.grad((wanted * weights).sum(), leaves)
    outputs, state = [], None
    for start, stop in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        o, state = layer(x[:, start:stop], state, return_state=True)
        outputs.append(o)
    o = torch.cat(outputs, dim=1)
    assert_close(o, wanted, 1e-10)
    for got, exact in zip(torch.autograd.grad((o * weights).sum(), leaves), gradients, strict=True):
        assert_close(got, exact, 1e-9)
    if cuts:
        _, state = layer(x[:, : cuts[-1]], return_state=True)
        assert_close(layer(x[:, cuts[-1] :], state), wanted[:, cuts[-1] :], 1e-10)


def test_a_saved_state_goes_on(tmp_path):
    layer = randomised(LAYERS["linear, all options"](), torch.float32)
    x = torch.randn(2, LENGTH, DIM)
    wanted = layer(x)
    _, state = layer(x[:, :7], return_state=True)
    save_file(state.tensors(), tmp_path / "state.safetensors")
    loaded = states.from_tensors(TTTLayerState, load_file(tmp_path / "state.safetensors"))
    assert_close(layer(x[:, 7:], loaded), wanted[:, 7:], 1e-5)
    swapped = layer(x[[1, 0], 7:], state.select([1, 0]).detach())
    assert_close(swapped, wanted[[1, 0], 7:], 1e-5)


def test_an_mlps_saved_state_has_its_kind():
    layer = randomised(LAYERS["mlp"](), torch.float32)
    _, state = layer(torch.randn(1, 5, DIM), return_state=True)
    loaded = states.from_tensors(TTTLayerState, state.tensors())
    assert type(loaded.learner) is type(state.learner)
    assert loaded.learner.position == 1


@pytest.mark.parametrize("name", ["linear, all options", "mlp"])
def test_states_of_several_batches_are_one(name):
    """Sequences at one place keep one position; at several, each has its own."""
    layer = randomised(LAYERS[name]())
    x = torch.randn(3, LENGTH, DIM, dtype=torch.float64)
    cuts = (7, 7, 9)
    parts = [layer(x[i : i + 1, :n], return_state=True)[1] for i, n in enumerate(cuts)]
    same, mixed = states.concatenate(parts[:2]), states.concatenate([*parts[:2], parts[2]])
    assert same.learner.position == 3
    assert mixed.learner.position.tolist() == [3, 3, 1]
    rest = torch.stack([x[i, n : n + 10] for i, n in enumerate(cuts)])
    wanted = torch.stack([layer(x)[i, n : n + 10] for i, n in enumerate(cuts)])
    assert_close(layer(rest[:2], same), wanted[:2], 1e-10)
    assert_close(layer(rest, mixed), wanted, 1e-10)
    twice = states.concatenate([mixed, same])
    assert twice.learner.position.tolist() == [3, 3, 1, 3, 3]
    assert_close(layer(rest[[0, 1, 2, 0, 1]], twice), wanted[[0, 1, 2, 0, 1]], 1e-10)


@pytest.mark.parametrize("kind", [TTTLinear, TTTMLP])
def test_two_directions_say_why_not(kind):
    layer = kind(DIM, 2, bidirectional=True, conv_kernel_size=4)
    with pytest.raises(ValueError, match="second direction begins at the last token"):
        layer(torch.randn(1, 5, DIM), return_state=True)
    with pytest.raises(ValueError, match=r"reverse_channels=32 has no state"):
        layer.conv_q(torch.randn(1, 5, 2 * DIM), return_state=True)


def test_a_state_of_a_layer_with_other_convolutions():
    x = torch.randn(1, 5, DIM)
    plain, convolved = TTTLinear(DIM, 2), TTTLinear(DIM, 2, conv_kernel_size=4)
    with pytest.raises(ValueError, match="layer with convolutions, got conv_q None"):
        convolved(x, plain(x, return_state=True)[1])
    with pytest.raises(ValueError, match=r"layer without convolutions, got conv_q \[1, 3, 32\]"):
        plain(x, convolved(x, return_state=True)[1])


def test_a_convolutions_state_that_does_not_fit():
    conv, x, state = DirectionalConv1d(DIM, 4), torch.randn(1, 5, DIM), torch.randn(1, 3, DIM)

    def refused(error, told, state, lengths=None):
        with pytest.raises(error, match=f"DirectionalConv1d: {told}"):
            conv(x, state, True, lengths)

    refused(ValueError, r"state must have shape \[1, 3, 32\], got \[1, 2, 32\]", state[:, 1:])
    refused(ValueError, "state is on meta, x on cpu", state.to("meta"))
    refused(TypeError, "state must be one of .* got torch.complex64", state.to(torch.complex64))
    refused(TypeError, "state must be a strided tensor", state.to_sparse())
    refused(TypeError, "state must be a tensor, got list", state.tolist())
    refused(TypeError, "lengths must be .* int64, got list", None, [2])
    refused(ValueError, r"lengths must have shape \[1\], got \[2\]", None, torch.tensor([1, 2]))
    refused(ValueError, r"lengths must be in 0 … 5, got \[6\]", state, torch.tensor([6]))
    refused(ValueError, "lengths is on meta", state, torch.tensor([6], device="meta"))


def test_a_layers_state_that_does_not_fit():
    layer, x = rotated(), torch.randn(1, 5, DIM)
    _, state = layer(x, return_state=True)
    with pytest.raises(TypeError, match="state must be a TTTLayerState, got LinearState"):
        layer(x, state.learner)
    with pytest.raises(ValueError, match=r"state.learner is missing"):
        layer(x, state._replace(learner=None))
    with pytest.raises(TypeError, match=r"state.learner must be a LinearState or .* got int"):
        layer(x, state._replace(learner=3))
    moved = state.learner._replace(position=torch.tensor([1], device="meta"))
    with pytest.raises(ValueError, match="MiniBatchRotary: position is on meta"):
        layer(x, state._replace(learner=moved))
    with pytest.raises(TypeError, match=r"MiniBatchRotary: position must be an int, got 1\.0"):
        layer(x, state._replace(learner=state.learner._replace(position=1.0)))
    with pytest.raises(ValueError, match=r"ttt_linear: state\.start_w is on meta, q on cpu"):
        layer(x, state._replace(learner=state.to("meta").learner))


def test_rotations_are_not_rounded():
    """A table in half precision would be of other angles."""
    rotary = MiniBatchRotary(8, 16)
    half = MiniBatchRotary(8, 16).to(torch.bfloat16)
    assert torch.equal(half.table, rotary.table)
    with torch.device("meta"):
        planned = MiniBatchRotary(8, 16)
    planned.to_empty(device="cpu")
    assert torch.equal(planned.table, rotary.table)


def test_rotations_by_place():
    """Products of rotated tokens depend on the difference of their places; place 0 stays."""
    rotary = MiniBatchRotary(8, 4)
    x = torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(1, 9, 1, 8)
    y = rotary(x)
    assert torch.equal(y[:, [0, 4, 8]], x[:, [0, 4, 8]])
    assert_close((y[0, 1] * y[0, 2]).sum(), (y[0, 6] * y[0, 7]).sum(), 1e-6)
    assert torch.equal(rotary(x[:, :3], 2), rotary(x)[:, 2:5])
    each = rotary(x[:, :3].expand(2, 3, 1, 8), torch.tensor([1, 2]))
    assert torch.equal(each[0], y[0, 1:4])
    assert torch.equal(each[1], y[0, 2:5])
    with pytest.raises(ValueError, match="head_dim=7"):
        MiniBatchRotary(7, 4)


def test_rotations_that_an_op_would_leave_out_are_refused():
    model = timm.create_model("vittt_nano_patch4_32", num_classes=10)
    model.blocks[0].mixer.ttt.rotary = MiniBatchRotary(model.blocks[0].mixer.ttt.head_dim, 16)
    with pytest.raises(ValueError, match="rotates q and k"):
        vision_ttt.for_inference(model, strict=True)


@pytest.mark.parametrize("inner_model", ["linear", "mlp"])
@pytest.mark.parametrize("assign", [True, False])
def test_a_model_made_on_meta_is_loaded_as_pytorch_does_it(inner_model, assign):
    kwargs = {"depth": 1, "num_classes": 4, "inner_model": inner_model}
    model = timm.create_model("vittt_nano_patch4_32", **kwargs).eval()
    with torch.device("meta"):
        loaded = timm.create_model("vittt_nano_patch4_32", **kwargs).eval()
    if not assign:
        loaded.to_empty(device="cpu")
    loaded.load_state_dict(model.state_dict(), assign=assign)
    x = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(loaded(x), model(x))
