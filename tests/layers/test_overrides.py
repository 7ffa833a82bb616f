"""Replaced parts run, hooks fire, and tensors that callers keep are not overwritten."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules import module as all_modules

from tolerances import assert_close
from vision_ttt.layers import (
    ConvMlp,
    DiT3Block,
    MambaBlock,
    Mlp,
    SwiGLU,
    TTTLayer,
    TTTLinear,
    ViT3Block,
    ViT3TTT,
    VitttBlock,
    VitttMixer,
)
from vision_ttt.ops.swiglu import swiglu

GRID = (5, 7)
TOKENS = (2, 35, 64)
VITTT = {"bidirectional": True, "share_qk": True, "conv_kernel_size": 4, "gate": True}


class Conditioned(DiT3Block):
    """A block of DiT³ conditioned on the mean token, with the call of the other blocks."""

    def forward(self, x, grid):
        return super().forward(x, x.mean(1), grid)


BLOCKS = {
    "vittt": lambda: VitttBlock(VitttMixer(64, ttt=TTTLinear(64, 2, **VITTT)), 64, 48),
    "vit3": lambda: ViT3Block(64, 2),
    "h-vit3": lambda: ViT3Block(64, 2, mlp=ConvMlp(64, 128)),
    "dit3": lambda: Conditioned(64, 2),
    "mamba": lambda: MambaBlock(64),
}
BRANCHES = {"vittt": ("mixer.conv2d", "mixer.ttt", "mlp"), "mamba": ("norm", "mixer")}
OTHER_BRANCHES = ("cpe", "ttt", "mlp")


def make(name):
    torch.manual_seed(0)
    block = BLOCKS[name]().eval()
    with torch.no_grad():  # no parameter at a value that hides a term
        for parameter in block.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return block


def mixed(ttt, x):
    """A TTT layer as its parts one after the other."""
    q, k, v, eta, gate = ttt.views(x)
    return ttt.out_proj(ttt.merge(ttt.learner(q, k, v, eta).flatten(2), gate))


def composition(block, y):
    """A Vittt block as the calls of its parts, one after the other."""
    mixer, ttt, mlp = block.mixer, block.mixer.ttt, block.mlp
    y = y + mixer.conv2d(y, GRID)
    x = mixer.norm(y)
    y = y + mixer.drop_path(mixed(ttt, x))
    return y + block.drop_path(mlp.fc2(swiglu(mlp.fc1(block.norm(y)))))


def values_and_gradients(function, block, y):
    y = y.detach().requires_grad_()
    out = function(y)
    gradients = torch.autograd.grad(out.square().sum(), [y, *block.parameters()])
    return [out, *gradients]


# Replaced parts run. Replacements change signs rather than lengths, which norms would hide.


class OwnRates(TTTLinear):
    def rates(self, logits):
        return 3 * super().rates(logits)


def rates_of_a_subclass(block):
    block.mixer.ttt.__class__ = OwnRates


def rates_of_an_instance(block):
    ttt = block.mixer.ttt
    ttt.rates = lambda logits: 3 * TTTLayer.rates(ttt, logits)


def views_of_an_instance(block):
    ttt = block.mixer.ttt

    def views(x):
        q, *others = TTTLayer.views(ttt, x)
        return -q, *others

    ttt.views = views


def positions_of_an_instance(block):
    learner = block.mixer.ttt.learner
    scale = learner.position_scale
    learner.position_scale = lambda: 0.5 * scale()


def state_of_an_instance(block):
    learner = block.mixer.ttt.learner
    learner.state = lambda: (2 * learner.w0, learner.b0)


def problem_of_an_instance(block):
    learner = block.mixer.ttt.learner
    problem = learner.problem
    learner.problem = lambda *views: problem(*views) | {"eps": 0.3}


def positive(path):
    def change(block):
        module = block.get_submodule(path)
        forward = module.forward
        module.forward = lambda *inputs: forward(*inputs).abs()

    change.__name__ = f"forward of {path}"
    return change


def positive_after(path):
    def change(block):
        block.get_submodule(path).register_forward_hook(lambda _m, _i, output: output.abs())

    change.__name__ = f"a hook on {path}"
    return change


def positive_before(path):
    def change(block):
        block.get_submodule(path).register_forward_pre_hook(
            lambda _m, inputs: (inputs[0].abs(), *inputs[1:])
        )

    change.__name__ = f"a pre-hook on {path}"
    return change


PARTS = [
    "mixer.conv2d",
    "mixer.norm",
    "mixer.drop_path",
    "mixer.ttt.in_proj",
    "mixer.ttt.rate_proj",
    "mixer.ttt.conv_q",
    "mixer.ttt.conv_k",
    "mixer.ttt.learner",
    "mixer.ttt.merge",
    "mixer.ttt.out_proj",
    "norm",
    "mlp.fc1",
    "mlp.fc2",
    "drop_path",
]
CHANGES = [
    rates_of_a_subclass,
    rates_of_an_instance,
    views_of_an_instance,
    positions_of_an_instance,
    state_of_an_instance,
    problem_of_an_instance,
    *(positive(path) for path in PARTS),
    *(positive_after(path) for path in PARTS),
    *(positive_before(path) for path in PARTS),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_replaced_is_what_runs(change):
    block, y = make("vittt"), torch.randn(TOKENS)
    before = block(y, GRID)
    change(block)
    wanted = values_and_gradients(lambda y: composition(block, y), block, y)
    assert not torch.allclose(wanted[0], before, rtol=1e-3)  # or this tests nothing
    got = values_and_gradients(lambda y: block(y, GRID), block, y)
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b, 2e-5)
    with torch.no_grad():
        assert_close(block(y, GRID), wanted[0], 2e-6)


def test_rates_of_a_subclass_made_as_such():
    torch.manual_seed(0)
    layer, x = OwnRates(64, 2, **VITTT), torch.randn(TOKENS)
    exact = TTTLinear(64, 2, **VITTT, base_learning_rate=3.0)
    exact.load_state_dict(layer.state_dict())
    wanted = exact(x)
    assert_close(layer(x), wanted, 1e-6)
    with torch.no_grad():
        assert_close(layer(x), wanted, 1e-6)


def test_an_mlp_of_another_make():
    block, y = make("vittt"), torch.randn(TOKENS)
    block.mlp = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64))
    middle = block.mixer(y, GRID)
    wanted = middle + block.mlp(block.norm(middle))
    out = block(y, GRID)
    assert_close(out, wanted, 1e-6)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in block.mlp.parameters())
    with torch.no_grad():
        assert_close(block(y, GRID), wanted, 1e-6)


@pytest.mark.parametrize("part", ["mlp", "mixer.ttt"])
def test_an_identity_in_the_place_of_a_part(part):
    block, y = make("vittt"), torch.randn(TOKENS)
    block.set_submodule(part, nn.Identity())
    mixer = block.mixer
    middle = y + mixer.conv2d(y, GRID)
    middle = middle + mixer.ttt(mixer.norm(middle))
    wanted = middle + block.mlp(block.norm(middle))
    assert_close(block(y, GRID), wanted, 1e-6)
    with torch.no_grad():
        assert_close(block(y, GRID), wanted, 1e-6)


def test_another_learner_brings_its_own_mini_batches():
    """They are larger than the fused op supports."""
    block, y = make("vittt"), torch.randn(2, 180, 64)
    learner = block.mixer.ttt.learner
    block.mixer.ttt.learner = type(learner)(2, 32, mini_batch_size=170, directions=2)
    ttt, x = block.mixer.ttt, torch.randn(2, 180, 64)
    wanted = mixed(ttt, x)
    assert_close(ttt(x), wanted, 1e-6)
    with torch.no_grad():
        assert_close(ttt(x), wanted, 1e-6)
        assert torch.isfinite(block(y, (12, 15))).all()


# Hooks fire, once per call.

OWN_HOOKS = {
    "forward": "register_forward_hook",
    "forward pre": "register_forward_pre_hook",
    "backward": "register_full_backward_hook",
    "backward pre": "register_full_backward_pre_hook",
}
GLOBAL_HOOKS = {
    "forward": all_modules.register_module_forward_hook,
    "forward pre": all_modules.register_module_forward_pre_hook,
    "backward": all_modules.register_module_full_backward_hook,
    "backward pre": all_modules.register_module_full_backward_pre_hook,
}


def times_called(name, path):
    """A block of ViT³ has one module for both of its branches."""
    return 2 if "vit3" in name and path == "drop_path" else 1


def run(block, gradients):
    with torch.set_grad_enabled(gradients):
        out = block(torch.randn(TOKENS, requires_grad=gradients), GRID)
    if gradients:
        out.sum().backward()


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kind", OWN_HOOKS)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_hook_on_one_part_alone_fires_once(name, kind, gradients):
    if "backward" in kind and not gradients:
        pytest.skip("there is no backward pass")
    block, fired = make(name), []
    paths = [path for path, _ in block.named_modules()]
    for path in paths:
        register = getattr(block.get_submodule(path), OWN_HOOKS[kind])
        handle = register(lambda *_, path=path: fired.append(path))
        run(block, gradients)
        handle.remove()
    assert fired == [path for path in paths for _ in range(times_called(name, path))]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kind", GLOBAL_HOOKS)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_hook_on_all_modules_fires_once_for_each(name, kind, gradients):
    if "backward" in kind and not gradients:
        pytest.skip("there is no backward pass")
    block, fired = make(name), []
    handle = GLOBAL_HOOKS[kind](lambda module, *_: fired.append(id(module)))
    try:
        run(block, gradients)
    finally:
        handle.remove()
    called = [
        id(module)
        for path, module in block.named_modules()
        for _ in range(times_called(name, path))
    ]
    assert sorted(fired) == sorted(called)


def test_hooks_change_no_number():
    block, y = make("vittt"), torch.randn(TOKENS)
    wanted = values_and_gradients(lambda y: block(y, GRID), block, y)
    for module in block.modules():
        module.register_full_backward_hook(lambda *_: None)
        module.register_forward_hook(lambda *_: None)
    got = values_and_gradients(lambda y: block(y, GRID), block, y)
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b, 2e-5)


def test_dropout_in_the_place_of_a_projection_is_drawn_once():
    """Low-rank adapters have one; computing again would draw again."""
    torch.manual_seed(0)
    mlp, x = SwiGLU(64, 48), torch.randn(TOKENS)
    mlp.fc2 = nn.Sequential(nn.Dropout(0.5), mlp.fc2)

    def gradients(function):
        torch.manual_seed(1)
        return values_and_gradients(function, mlp, x)

    wanted = gradients(lambda x: mlp.fc2(swiglu(mlp.fc1(x))))
    for a, b in zip(gradients(mlp), wanted, strict=True):
        assert_close(a, b, 1e-6)


# Tensors that callers keep are not overwritten.


class Keeper(nn.Module):
    """Runs another module and keeps what went in and what came out."""

    def __init__(self, kept, inner):
        super().__init__()
        self.kept = kept
        self.inner = inner

    def forward(self, *inputs):
        output = self.inner(*inputs)
        for x in (*inputs, output):
            if isinstance(x, torch.Tensor):
                self.kept.append((x, x.clone()))
        return output


class Adapter(nn.Module):
    """A wrapper as peft makes it: switched off, it returns the base layer's output."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, *inputs):
        return self.base_layer(*inputs)


def keep(block, path, kept):
    block.set_submodule(path, Keeper(kept, block.get_submodule(path)))


def keep_inside(block, path, kept):
    adapter = Adapter(block.get_submodule(path))
    adapter.base_layer.register_forward_hook(
        lambda _m, _i, output: kept.append((output, output.clone()))
    )
    block.set_submodule(path, adapter)


def listen(block, path, kept):
    block.get_submodule(path).register_forward_hook(
        lambda _m, inputs, output: kept.extend(
            (x, x.clone()) for x in (*inputs, output) if isinstance(x, torch.Tensor)
        )
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", [keep, keep_inside, listen], ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", BLOCKS)
def test_what_a_part_returned_is_not_overwritten(name, way, dtype):
    plain = make(name).to(dtype)
    y = torch.randn(1, 1056, 64).to(dtype)
    before = y.clone()
    with torch.inference_mode():
        wanted = plain(y, (32, 33))
        for path in [path for path, _ in plain.named_modules() if path]:
            block, kept = copy.deepcopy(plain), []
            way(block, path, kept)
            got = block(y, (32, 33))
            assert_close(got, wanted, 2e-6 if dtype == torch.float32 else 2e-2)
            assert kept, path
            assert all(torch.equal(x, then) for x, then in kept), path
    assert torch.equal(y, before)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_branch_that_returns_its_input(name):
    """With an identity for a convolution the sum must not overwrite the caller's tensor."""
    block, y = make(name), torch.randn(TOKENS)

    class Same(nn.Module):
        def forward(self, x, *_):
            return x

    for part in BRANCHES.get(name, OTHER_BRANCHES):
        changed = copy.deepcopy(block)
        changed.set_submodule(part, Same())
        before, wanted = y.clone(), changed(y, GRID)
        with torch.no_grad():
            assert_close(changed(y, GRID), wanted, 2e-6)
        assert torch.equal(y, before)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_branch_that_returns_a_tensor_it_keeps(name):
    """Modules that cache their output do so."""
    block, y = make(name), torch.randn(TOKENS)

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.answer = torch.randn(TOKENS)

        def forward(self, *_):
            return self.answer

    for part in BRANCHES.get(name, OTHER_BRANCHES):
        changed = copy.deepcopy(block)
        changed.set_submodule(part, Cached())
        answer = changed.get_submodule(part).answer
        before = answer.clone()
        with torch.no_grad():
            wanted = changed(y, GRID)
            assert torch.equal(changed(y, GRID), wanted)
        assert torch.equal(answer, before)


@pytest.mark.parametrize("module", [SwiGLU(64, 48), Mlp(64, 48), ViT3TTT(64, 2)], ids=type)
def test_a_layer_alone_leaves_its_input(module):
    x = torch.randn(TOKENS)
    before, arguments = x.clone(), () if isinstance(module, SwiGLU) else (GRID,)
    with torch.inference_mode():
        module(x, *arguments)
    assert torch.equal(x, before)
