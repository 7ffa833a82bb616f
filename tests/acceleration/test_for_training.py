"""for_training: the same numbers from the same parameters, and no hook that is passed over."""

import copy
import pickle
import re
import warnings
from functools import partial

import pytest
import torch
from timm.layers import DropPath
from torch import nn
from torch.nn.utils import parametrize

from kernel_calls import record_kernel_calls
from tolerances import assert_close
from vision_ttt import for_inference, for_training, to_plain
from vision_ttt.acceleration import COMPOSITES
from vision_ttt.acceleration.composite_linear import CompositeLinear
from vision_ttt.acceleration.composite_vittt import CompositeTTTLinear, CompositeVitttBlock
from vision_ttt.explain import gradient_magnitude, inner_losses
from vision_ttt.layers import (
    BidirectionalMamba,
    DirectionalConv1d,
    GatedNorm,
    LinearLearner,
    MiniBatchRotary,
    TTTLinear,
    VitttBlock,
    VitttMixer,
)
from vision_ttt.models import create_model
from vision_ttt.ops._table import TABLE

VITTT = {"bidirectional": True, "share_qk": True, "conv_kernel_size": 4, "gate": True}
TOKENS = (2, 35, 64)
MODELS = {
    "vittt": ("vittt_nano_patch4_32", {"depth": 2}),
    "vittt one way": ("vittt_nano_patch4_32", {"depth": 2, "design": "conv1d"}),
    "vim": ("vim_nano_patch4_32", {"depth": 2}),
    "mambar": ("mambar_nano_patch4_32", {"depth": 2}),
    "vit3": ("vit3_nano_patch4_32", {"depth": 2}),
}


def make(name, **options):
    torch.manual_seed(0)
    model, given = MODELS[name]
    return create_model(model, num_classes=10, **{**given, **options})


def both(module):
    """A module, and a copy that trains by composite ops."""
    return module, for_training(copy.deepcopy(module), strict=True)


def make_layer(kind=TTTLinear, **options):
    torch.manual_seed(0)
    layer = kind(64, 2, **{**VITTT, **options})
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def make_block(**options):
    torch.manual_seed(0)
    return VitttBlock(VitttMixer(64, ttt=make_layer()), 64, 48, **options)


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of fused_ttt_linear's kernel."""
    return record_kernel_calls(monkeypatch, TABLE["fused_ttt_linear"])


def assert_same(plain, composite, *inputs, tolerance=1e-4):
    """Outputs and all gradients agree."""
    results = []
    for module in (plain, composite):
        torch.manual_seed(1)  # one choice of dropped samples
        out = module(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(module.parameters()))])
    for wanted, got in zip(*results, strict=True):
        assert_close(got, wanted, tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_values_gradients_and_state_are_those_of_the_model(name):
    plain, model = both(make(name))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert any(type(module) in (CompositeLinear, *COMPOSITES) for module in model.modules())
    assert_same(plain, model, torch.randn(2, 3, 32, 32))


def test_the_model_stays_the_same_object_and_goes_back():
    plain, x = make_layer(), torch.randn(TOKENS)
    wanted, parameters = plain(x), list(plain.parameters())
    layer = for_training(plain)
    assert layer is plain
    assert isinstance(layer, CompositeTTTLinear)
    assert all(a is b for a, b in zip(layer.parameters(), parameters, strict=True))
    assert for_training(layer, strict=True) is layer  # once more changes nothing
    assert to_plain(layer) is plain
    assert {type(module) for module in layer.modules()}.isdisjoint((CompositeLinear, *COMPOSITES))
    assert torch.equal(layer(x), wanted)


def test_it_survives_copies_and_pickles(calls):
    layer, x = for_training(make_layer()), torch.randn(TOKENS)
    wanted = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), wanted)
    assert len(calls) == 3


PARTS = {
    "conv_q": lambda: DirectionalConv1d(128, 4, 64),
    "conv_k": nn.Identity,
    "learner": lambda: LinearLearner(4, 16, directions=2),
    "merge": lambda: GatedNorm(64, 2),
    "in_proj": lambda: nn.Linear(64, 320, bias=False),
    "rate_proj": lambda: nn.Linear(64, 4),
    "out_proj": nn.Identity,
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_layer_may_be_replaced_at_any_time(part):
    plain, layer = both(make_layer())
    other, x = PARTS[part](), torch.randn(TOKENS)
    setattr(plain, part, other)
    setattr(layer, part, other)
    wanted = _result(plain, x)
    if isinstance(wanted, str):
        assert wanted == _result(layer, x)
    else:
        assert_close(_result(layer, x), wanted, 1e-5)


def _result(layer, x):
    try:
        return layer(x)
    except (ValueError, RuntimeError) as error:
        return type(error).__name__


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_on_any_part_is_called_once(register):
    _, block = both(make_block())
    names = [name for name, _ in block.named_modules()]
    for name in names:
        fired = []
        handle = getattr(block.get_submodule(name), register)(partial(_fire, fired))
        block(torch.randn(TOKENS), (5, 7))
        assert fired == [1], name
        handle.remove()


def _fire(fired, *_):
    fired.append(1)


def test_hooks_on_all_modules_are_called():
    _, block = both(make_block())
    fired = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: fired.append(module))
    try:
        block(torch.randn(TOKENS), (5, 7))
    finally:
        handle.remove()
    assert sorted(map(id, fired)) == sorted(map(id, block.modules()))


@pytest.mark.parametrize("name", ["views", "rates"])
def test_a_method_that_is_replaced_later_is_called(name, calls):
    layer, x, called = for_training(make_layer()), torch.randn(TOKENS), []
    own = getattr(layer, name)
    setattr(layer, name, lambda *a: called.append(1) or own(*a))
    layer(x)
    assert called
    assert not calls


def test_parametrisations_and_functional_calls(calls):
    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    plain, layer = both(make_layer())
    x = torch.randn(TOKENS)
    parameters = {name: 0.5 * x for name, x in plain.named_parameters()}
    wanted = torch.func.functional_call(plain, parameters, (x,))
    assert_close(torch.func.functional_call(layer, parameters, (x,)), wanted, 2e-6)
    assert len(calls) == 1
    for each in (plain, layer):
        for part, name in (("conv_k", "weight"), ("learner", "w0"), ("merge", "bias")):
            parametrize.register_parametrization(each.get_submodule(part), name, Doubled())
    assert_close(layer(x), plain(x), 2e-6)
    assert len(calls) == 1  # a parametrised layer runs by its modules
    assert not torch.allclose(plain(x), make_layer()(x), rtol=1e-3)


class Doubled(TTTLinear):
    def forward(self, x):
        return 2 * super().forward(x)


UNSUPPORTED = {
    "subclass": (lambda: make_layer(Doubled), "the model (it is a Doubled, not a TTTLinear)"),
    "no convolution": (
        lambda: make_layer(conv_kernel_size=0),
        "the model (conv_q is a Identity, not a DirectionalConv1d)",
    ),
    "rotary": (
        lambda: make_layer(rotary=MiniBatchRotary(32, 16)),
        "the model (it rotates q and k)",
    ),
    "constant rates": (
        lambda: make_layer(learned_rates=False),
        "the model (its rates are not learned, or its inner models have no norm)",
    ),
    "hook": (lambda: _hooked(make_layer(), "learner"), "the model (learner has a hook)"),
    "some": (
        lambda: nn.Sequential(*(make_block() for _ in range(3)), _hooked(make_block(), "mlp.fc1")),
        "3 (mlp.fc1 has a hook)",
    ),
}


def _hooked(module, part):
    module.get_submodule(part).register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(("build", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_stays_as_it_is_is_named(build, message):
    with pytest.warns(RuntimeWarning) as said:
        for_training(build())
    assert str(said[0].message) == f"for_training leaves as they are: {message}"
    module = build()
    kinds = [type(x) for x in module.modules()]
    with pytest.raises(ValueError, match=re.escape(message)):
        for_training(module, strict=True)
    assert [type(x) for x in module.modules()] == kinds


def test_a_refused_model_keeps_what_an_earlier_call_changed():
    module = nn.Sequential(for_training(nn.Linear(3, 4)), _hooked(make_block(), "mlp.fc1"))
    kinds = [type(x) for x in module.modules()]
    with pytest.raises(ValueError, match="has a hook"):
        for_training(module, strict=True)
    assert [type(x) for x in module.modules()] == kinds


def test_names_of_many_are_one_line():
    many = nn.Sequential(*(_hooked(make_block(), "mlp.fc1") for _ in range(5)))
    with pytest.warns(RuntimeWarning, match=r"are: 0 and 4 more \(mlp.fc1 has a hook\)$"):
        for_training(many)


def test_a_model_without_such_layers_stays_as_it_is():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert for_training(model, strict=True) is model


@pytest.mark.parametrize("given", [3, None, "model"])
def test_what_is_no_module_is_refused(given):
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got"):
        for_training(given)


def test_a_packed_copy_is_refused_and_a_composite_model_is_packed():
    plain, model = both(make("vittt").eval())
    x = torch.randn(2, 3, 32, 32)
    packed = for_inference(model, strict=True)
    assert_close(packed(x), plain(x).detach(), 1e-5)
    assert isinstance(model.blocks[0], CompositeVitttBlock)  # for_inference copies
    with pytest.raises(ValueError, match="for_inference has packed this model"):
        for_training(packed)


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_has_the_same_bits(name):
    plain, model = both(make(name).eval())
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("rate", [None, 0.0, 0.5])
def test_a_block_runs_its_mlp_as_one_op(rate, monkeypatch):
    """Where samples are dropped the block adds the residual itself."""
    seen = []
    backend = TABLE["swiglu_mlp"].backends["cpu"]
    record = backend._replace(
        forward=lambda inputs: seen.append(inputs.residual) or backend.forward(inputs)
    )
    monkeypatch.setitem(TABLE["swiglu_mlp"].backends, "cpu", record)
    drop_path = {} if rate is None else {"drop_path": DropPath(rate)}
    plain, block = both(make_block(**drop_path))
    assert_same(plain.train(), block.train(), torch.randn(8, 35, 64), (5, 7))
    assert seen == [not rate]


@pytest.mark.parametrize("extra", [(), (0,)])
def test_tokens_outside_the_grid(extra):
    plain, block = both(make_block())
    assert_same(plain, block, torch.randn(2, 35 + len(extra), 64), (5, 7), extra)


def test_states_and_lengths_run_the_parts(calls):
    options = {"bidirectional": False, "gate": False}
    plain, layer = both(make_layer(**options))
    x = torch.randn(TOKENS)
    (wanted, state), (got, own) = (each(x, return_state=True) for each in (plain, layer))
    assert_close(got, wanted, 1e-6)
    assert_close(layer(x, own), plain(x, state), 1e-6)
    assert not calls


def test_mamba(monkeypatch):
    calls = record_kernel_calls(monkeypatch, TABLE["fused_mamba"])
    plain, layer = both(BidirectionalMamba(32))
    assert_same(plain, layer, torch.randn(2, 19, 32))
    assert len(calls) == 1
    with pytest.raises(ValueError, match="a bidirectional layer has no state"):
        layer(torch.randn(2, 19, 32), return_state=True)
    layer.conv.register_forward_hook(lambda *_: None)
    layer(torch.randn(2, 19, 32))
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["vittt", "vim"])
def test_under_fx_compile_and_autocast(name):
    plain, model = both(make(name))
    x, tokens = torch.randn(2, 3, 32, 32), torch.randn(2, 64, 96)
    if name == "vittt":
        given = {"grid": (8, 8), "extra": ()}
        traced = torch.fx.symbolic_trace(model.blocks[0], concrete_args=given)
        assert_close(traced(tokens, (8, 8), ()), plain.blocks[0](tokens, (8, 8)), 1e-5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), plain(x), 1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(model(x), plain(x), 2e-2)


def test_explanations_are_those_of_the_model():
    plain, model = both(make("vittt"))
    x = torch.randn(2, 3, 32, 32)
    wanted, got = inner_losses(plain, x), inner_losses(model, x)
    assert list(got) == list(wanted) == ["blocks.0.mixer.ttt", "blocks.1.mixer.ttt"]
    for name in wanted:
        assert_close(got[name], wanted[name], 1e-5)
    assert_close(gradient_magnitude(model, x), gradient_magnitude(plain, x), 1e-4)


@pytest.mark.parametrize("gradients", [False, True])
def test_an_input_that_somebody_keeps_stays_as_it_was(gradients):
    layer, x = for_training(make_layer()), torch.randn(TOKENS)
    kept = x.clone()
    with torch.set_grad_enabled(gradients):
        layer(x)
    assert torch.equal(x, kept)
