"""The switch ``fused`` of TTT-Linear layers: the same numbers, and errors for ignored changes."""

import copy
import pickle

import pytest
import torch
from timm.layers import DropPath
from torch import nn
from torch.nn.utils import parametrize

from kernel_calls import record_kernel_calls
from tolerances import assert_close
from vision_ttt.layers import (
    DirectionalConv1d,
    GatedNorm,
    LinearLearner,
    TTTLinear,
    VitttBlock,
    VitttMixer,
)
from vision_ttt.layers.fusable import unfuse
from vision_ttt.ops._table import TABLE

VITTT = {"bidirectional": True, "share_qk": True, "conv_kernel_size": 4, "gate": True}
TOKENS = (2, 35, 64)
OTHER_PARTS = {
    "conv_q": lambda: DirectionalConv1d(128, 4, 64),
    "conv_k": nn.Identity,
    "learner": lambda: LinearLearner(4, 16, directions=2),
    "merge": lambda: GatedNorm(64, 2),
    "in_proj": lambda: nn.Linear(64, 320, bias=False),
    "rate_proj": lambda: nn.Linear(64, 2),
    "out_proj": nn.Identity,
}


def make_layer(kind=TTTLinear, **options):
    torch.manual_seed(0)
    layer = kind(64, 2, **VITTT, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of the kernel."""
    return record_kernel_calls(monkeypatch, TABLE["fused_ttt_linear"])


def test_it_is_off_unless_asked_for_and_can_be_switched_off(calls):
    plain, fused, x = make_layer(), make_layer(fused=True), torch.randn(TOKENS)
    wanted = plain(x)
    assert not calls
    assert not plain.fused
    assert_close(fused(x), wanted, 2e-6)
    assert len(calls) == 1
    fused.fused = False
    assert torch.equal(fused(x), wanted)
    assert len(calls) == 1


def test_it_cannot_be_switched_on_later():
    layer = make_layer()
    with pytest.raises(ValueError, match="fused can be switched off later, not on"):
        layer.fused = True
    assert not layer.fused


def test_it_survives_copies_and_pickles(calls):
    layer, x = make_layer(fused=True), torch.randn(TOKENS)
    wanted = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), wanted)
    assert len(calls) == 3


ASSIGNMENTS = {
    "setattr": setattr,
    "set_submodule": nn.Module.set_submodule,
    "add_module": lambda layer, part, module: layer.add_module(part, module),
}


@pytest.mark.parametrize("assign", ASSIGNMENTS.values(), ids=ASSIGNMENTS)
@pytest.mark.parametrize("part", OTHER_PARTS)
def test_a_part_is_replaced_after_switching_off_only(part, assign):
    layer, x, other = make_layer(fused=True), torch.randn(TOKENS), OTHER_PARTS[part]()
    before = layer(x)
    with pytest.raises(ValueError, match=f"{part} is not called while fused is True"):
        assign(layer, part, other)
    assert torch.equal(layer(x), before)
    layer.fused = False
    assign(layer, part, other)
    assert layer.get_submodule(part) is other


@pytest.mark.parametrize("method", ["views", "rates"])
def test_methods_that_are_not_called_are_not_replaced(method):
    layer = make_layer(fused=True)
    with pytest.raises(ValueError, match=f"{method} is not called while fused is True"):
        setattr(layer, method, lambda *_: None)

    class Other(TTTLinear):
        pass

    setattr(Other, method, lambda *_: None)
    with pytest.raises(TypeError, match=f"Other overrides {method}, which is not called"):
        make_layer(Other, fused=True)
    with pytest.raises(TypeError, match=f"Other overrides {method}, which is not called"):
        layer.__class__ = Other
    assert not make_layer(Other).fused


def test_a_subclass_that_changes_something_else_may_be_fused(calls):
    class Doubled(TTTLinear):
        def forward(self, x):
            return 2 * super().forward(x)

    layer, x = make_layer(Doubled, fused=True), torch.randn(TOKENS)
    assert_close(layer(x), 2 * make_layer()(x), 2e-6)
    assert calls


def test_it_needs_a_convolution():
    with pytest.raises(ValueError, match="fused needs a Conv1d on q and k, got conv_kernel_size=0"):
        TTTLinear(64, 2, fused=True)


def test_what_lies_outside_is_called():
    """The parts that the op stands for only hold parameters: hooks on them do not run."""
    mixer = VitttMixer(64, ttt=make_layer(fused=True))
    block, fired = VitttBlock(mixer, 64, 48), []
    for name, module in block.named_modules():
        module.register_forward_hook(lambda *_, name=name: fired.append(name))
    block(torch.randn(TOKENS), (5, 7))
    hidden = {f"mixer.ttt.{part}" for part in OTHER_PARTS}
    assert set(fired) == {name for name, _ in block.named_modules()} - hidden
    assert len(fired) == len(set(fired))


def make_mixer(**options):
    torch.manual_seed(0)
    return VitttMixer(64, 2, **options)


@pytest.mark.parametrize("extra", [(), (0,)])
def test_mixer_convolves_adds_and_normalises_in_one_pass(extra):
    """Where tokens lie outside the grid, the parts are called."""
    plain, fused = make_mixer(), make_mixer(fused=True)
    assert not plain.fused
    fired, x = [], torch.randn(2, 35 + len(extra), 64)
    for part in (fused.conv2d, fused.norm):
        part.register_forward_hook(lambda *_: fired.append(1))
    results = []
    for mixer in (plain, fused):
        y = mixer(x, (5, 7), extra)
        results.append([y, *torch.autograd.grad(y.square().sum(), list(mixer.parameters()))])
    for wanted, got in zip(*results, strict=True):
        assert_close(got, wanted, 1e-4)
    assert len(fired) == 2 * len(extra)
    for part in ("conv2d", "norm"):
        with pytest.raises(ValueError, match=f"{part} is not called while fused is True"):
            setattr(fused, part, nn.Identity())
    with pytest.raises(ValueError, match="36 tokens do not fill a grid of 5 × 7"):
        fused(torch.randn(1, 36, 64), (5, 7))


def test_a_mixer_without_a_convolution_has_nothing_to_fuse():
    mixer = make_mixer(conv2d=False, fused=True)
    assert not mixer.fused
    mixer.norm = nn.Identity()  # is called, so that it may be replaced
    assert mixer(torch.randn(2, 35, 64), (5, 7)).shape == (2, 35, 64)


def make_block(**options):
    torch.manual_seed(0)
    return VitttBlock(make_mixer(), 64, 48, **options)


@pytest.mark.parametrize("rate", [None, 0.0, 0.5])
def test_block_runs_its_mlp_as_one_op(rate):
    """With a stochastic depth the block adds the residual itself."""
    drop_path = {} if rate is None else {"drop_path": DropPath(rate)}
    plain, fused = make_block(**drop_path), make_block(**drop_path, fused_mlp=True)
    fired, x, results = [], torch.randn(8, 35, 64), []
    for part in (fused.norm, fused.mlp, fused.mlp.fc1):
        part.register_forward_hook(lambda *_: fired.append(1))
    for block in (plain, fused):
        torch.manual_seed(1)  # one choice of dropped samples
        y = block(x, (5, 7))
        results.append([y, *torch.autograd.grad(y.square().sum(), list(block.parameters()))])
    for wanted, got in zip(*results, strict=True):
        assert_close(got, wanted, 1e-4)
    assert not fired
    for part in ("norm", "mlp", "drop_path"):
        with pytest.raises(ValueError, match=f"{part} is not called while fused is True"):
            setattr(fused, part, nn.Identity())
    fused.mlp.fused = False  # its parts may be replaced from here on
    fused.mlp.fc1 = nn.Linear(64, 96, bias=False)
    assert not torch.allclose(fused.eval()(x, (5, 7)), plain.eval()(x, (5, 7)), rtol=1e-3)
    assert len(fired) == 2
    unfuse(fused)
    fused(x, (5, 7))
    assert len(fired) == 4


def test_parameters_are_read_through_their_modules():
    """Parametrisations and functional calls change parameters, and no module."""

    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    plain, fused, x = make_layer(), make_layer(fused=True), torch.randn(TOKENS)
    for layer in (plain, fused):
        for part, name in (("conv_k", "weight"), ("learner", "w0"), ("merge", "bias")):
            parametrize.register_parametrization(layer.get_submodule(part), name, Doubled())
    assert_close(fused(x), plain(x), 2e-6)
    assert not torch.allclose(plain(x), make_layer()(x), rtol=1e-3)
    parameters = {name: 0.5 * x for name, x in plain.named_parameters()}
    wanted = torch.func.functional_call(plain, parameters, (x,))
    assert_close(torch.func.functional_call(fused, parameters, (x,)), wanted, 2e-6)


@pytest.mark.parametrize("gradients", [False, True])
def test_an_input_that_somebody_keeps_stays_as_it_was(gradients):
    layer, x = make_layer(fused=True), torch.randn(TOKENS)
    kept = x.clone()
    with torch.set_grad_enabled(gradients):
        layer(x)
    assert torch.equal(x, kept)
