"""Mamba in one direction: against transformers' mixer, in parts, and beside both directions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tolerances import assert_close
from vision_ttt.layers import BidirectionalMamba, Mamba, MambaState
from vision_ttt.ops import states

LENGTH, DIM = 21, 32
THEIRS = {  # our parameter → transformers'
    "in_proj.weight": "in_proj.weight",
    "conv.weight": "conv1d.weight",
    "conv.bias": "conv1d.bias",
    "x_proj": "x_proj.weight",
    "dt_proj": "dt_proj.weight",
    "dt_bias": "dt_proj.bias",
    "A_log": "A_log",
    "D": "D",
    "out_proj.weight": "out_proj.weight",
}


def randomised(layer: torch.nn.Module, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer.to(dtype)


@pytest.mark.parametrize(
    "sizes",
    [{}, {"state": 5, "expand": 3, "conv_kernel_size": 2, "dt_rank": 7}],
    ids=["defaults", "other sizes"],
)
def test_transformers_mixer(sizes):
    """Outputs and every gradient, weights copied."""
    modeling = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    layer = randomised(Mamba(DIM, **sizes), torch.float32)
    config = modeling.MambaConfig(
        hidden_size=DIM,
        state_size=layer.state,
        expand=sizes.get("expand", 2),
        conv_kernel=layer.conv.kernel_size[0],
        time_step_rank=layer.rank,
        num_hidden_layers=1,
        use_bias=False,
    )
    mixer = modeling.MambaMixer(config, 0).eval()
    own = dict(layer.named_parameters())
    mixer.load_state_dict({theirs: own[ours].detach() for ours, theirs in THEIRS.items()})
    x = torch.randn(2, LENGTH, DIM)
    weights = torch.randn(2, LENGTH, DIM)
    y, wanted = layer(x), mixer(x)
    assert_close(y, wanted, 1e-5)
    (y * weights).sum().backward()
    (wanted * weights).sum().backward()
    theirs = dict(mixer.named_parameters())
    assert own.keys() == THEIRS.keys()
    assert theirs.keys() == set(THEIRS.values())
    for name, parameter in own.items():
        assert_close(parameter.grad, theirs[THEIRS[name]].grad, 1e-4, name)


@settings(max_examples=10, deadline=None)
@given(
    cuts=st.sets(st.integers(1, LENGTH - 1), max_size=5).map(sorted), taps=st.sampled_from([1, 4])
)
def test_parts_equal_the_whole(cuts, taps):
    """Outputs and all gradients."""
    layer = randomised(Mamba(DIM, state=4, conv_kernel_size=taps))
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


def test_a_saved_state_goes_on(tmp_path):
    layer = randomised(Mamba(DIM), torch.float32)
    x = torch.randn(2, LENGTH, DIM)
    wanted = layer(x)
    _, state = layer(x[:, :7], return_state=True)
    assert [*state.conv.shape] == [2, 3, 2 * DIM]
    assert [*state.scan.shape] == [2, 2 * DIM, 16]
    for each in state:  # as large as the numbers, not as the sequence
        assert each.untyped_storage().nbytes() == each.nbytes
    save_file(state.tensors(), tmp_path / "state.safetensors")
    loaded = states.from_tensors(MambaState, load_file(tmp_path / "state.safetensors"))
    assert_close(layer(x[:, 7:], loaded), wanted[:, 7:], 1e-5)
    swapped = layer(x[[1, 0], 7:], state.select([1, 0]).detach())
    assert_close(swapped, wanted[[1, 0], 7:], 1e-5)
    last, _ = layer(x[:, 7:8], loaded, return_state=True)
    assert_close(last, wanted[:, 7:8], 1e-5)


def test_low_precision():
    """Finite and near float32, with a state in float32, under autocast and in bfloat16."""
    layer = randomised(Mamba(DIM), torch.float32)
    x = torch.randn(2, LENGTH, DIM)
    wanted = layer(x)
    for low in (False, True):
        own = layer.bfloat16() if low else layer
        given_x = x.bfloat16() if low else x
        with torch.autocast("cpu", torch.bfloat16, enabled=not low):
            first, state = own(given_x[:, :9], return_state=True)
            o = torch.cat([first, own(given_x[:, 9:], state)], dim=1)
        assert o.dtype == torch.bfloat16
        assert state.scan.dtype == torch.float32
        assert_close(o, wanted, 5e-2)
        o.float().square().sum().backward()
        assert all(p.grad.isfinite().all() for p in own.parameters())
        own.zero_grad(set_to_none=True)


def test_the_first_direction_of_both():
    """Its parameters load as they are; what is left is the other direction and their mean."""
    both, layer = randomised(BidirectionalMamba(DIM)), Mamba(DIM).double()
    inner, own = both.inner, layer.state_dict()
    stacked = both.state_dict()
    assert stacked.keys() == own.keys()
    loaded = {
        name: x if x.shape == own[name].shape else x.reshape(2, *own[name].shape)[0]
        for name, x in stacked.items()
    }
    layer.load_state_dict(loaded)
    with torch.no_grad():  # without taps and bias the other direction's u is zero
        both.conv.weight[inner:] = 0
        both.conv.bias[inner:] = 0
    x = torch.randn(2, LENGTH, DIM, dtype=torch.float64)
    assert_close(both(x), layer(x) / 2, 1e-11)


def test_fresh_layers_are_alike():
    torch.manual_seed(0)
    layer = Mamba(64, dt_range=(0.01, 0.2))
    dt = torch.nn.functional.softplus(layer.dt_bias)
    assert dt.min() >= 0.01 * (1 - 1e-4)
    assert dt.max() <= 0.2 * (1 + 1e-4)
    torch.testing.assert_close(layer.A_log.exp(), torch.arange(1.0, 17).expand(128, 16))
    assert layer.no_weight_decay() == {"A_log", "D", "dt_bias"}
    assert layer.no_weight_decay() == BidirectionalMamba(16).no_weight_decay()


def test_what_does_not_fit():
    layer, x = Mamba(DIM), torch.randn(2, 5, DIM)
    _, state = layer(x, return_state=True)
    with pytest.raises(TypeError, match="must be a MambaState, got tuple"):
        layer(x, tuple(state))
    with pytest.raises(ValueError, match=r"must have shape \[2, 3, 64\], got \[1, 3, 64\]"):
        layer(x, state.select([0]))
    with pytest.raises(ValueError, match="initial_state must have shape"):
        layer(x, state._replace(scan=state.scan[:, 1:]))
    for name in state._fields:
        with pytest.raises(ValueError, match=f"state.{name} is missing"):
            layer(x, state._replace(**{name: None}))
        with pytest.raises(ValueError, match=r"state is on meta, . on cpu"):
            layer(x, state._replace(**{name: getattr(state, name).to("meta")}))
        with pytest.raises(TypeError, match=r"state must be one of .* got torch.complex64"):
            layer(x, state._replace(**{name: getattr(state, name).to(torch.complex64)}))
    with pytest.raises(ValueError, match="dt_rank must be at least 1, got 0"):
        Mamba(DIM, dt_rank=0)


def test_two_directions_say_why_not():
    layer, x = BidirectionalMamba(DIM), torch.randn(1, 5, DIM)
    state = Mamba(DIM)(x, return_state=True)[1]
    for call in ({"state": state}, {"return_state": True}):
        with pytest.raises(ValueError, match="second direction begins at the last token"):
            layer(x, **call)
