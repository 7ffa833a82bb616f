"""Models with fused layers: the same numbers from the same weights."""

import pytest
import torch

from tolerances import assert_close
from vision_ttt import for_inference
from vision_ttt.explain import gradient_magnitude, inner_losses
from vision_ttt.layers import SwiGLU, TTTLinear, unfuse
from vision_ttt.models import create_model

NANO = "vittt_nano_patch4_32"
SWITCHES = [{"fused": True}, {"fused_mlp": True}, {"fused": True, "fused_mlp": True}]


def make(**options):
    torch.manual_seed(0)
    return create_model(NANO, depth=2, num_classes=10, **options)


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda switches: "+".join(switches))
@pytest.mark.parametrize("design", ["conv1d", "dual", "conv2d"])
def test_the_same_values_and_gradients(design, switches):
    plain, fused = make(design=design), make(design=design, **switches)
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 32, 32)
    outs = [model(x) for model in (plain, fused)]
    assert_close(outs[1], outs[0], 1e-5)
    gradients = [
        torch.autograd.grad(out.square().sum(), list(model.parameters()))
        for out, model in zip(outs, (plain, fused), strict=True)
    ]
    for (name, _), a, b in zip(plain.named_parameters(), *gradients, strict=True):
        assert_close(b, a, 1e-4, name)


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda switches: "+".join(switches))
def test_every_block_has_the_switch(switches):
    model = make(**switches)
    layers = {"fused": TTTLinear, "fused_mlp": SwiGLU}
    for name, kind in layers.items():
        states = [module.fused for module in model.modules() if isinstance(module, kind)]
        assert states == 2 * [switches.get(name, False)]


@pytest.mark.parametrize(
    "options", [{"inner_model": "mlp"}, *({"design": d} for d in ("ttt_layer", "gating"))], ids=str
)
def test_what_has_no_such_op_is_refused(options):
    with pytest.raises(ValueError, match="fused requires inner_model='linear' and a design with a"):
        make(fused=True, **options)
    make(fused_mlp=True, **options)


@pytest.mark.parametrize(
    "switches",
    [*(pytest.param(alone, marks=pytest.mark.slow) for alone in SWITCHES[:2]), SWITCHES[2]],
    ids=lambda switches: "+".join(switches),
)
def test_under_fx_compile_and_autocast(switches):
    plain, fused = make().eval(), make(**switches).eval()
    x = torch.randn(2, 3, 32, 32)
    wanted = plain(x)
    traced = torch.fx.symbolic_trace(fused.blocks[0], concrete_args={"grid": (8, 8), "extra": ()})
    tokens = torch.randn(2, 64, 96)
    assert_close(traced(tokens, (8, 8), ()), plain.blocks[0](tokens, (8, 8)), 1e-5)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), wanted, 1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(fused(x), plain(x), 2e-2)


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda switches: "+".join(switches))
def test_for_inference_knows_them(switches):
    model, x = make(**switches).eval(), torch.randn(2, 3, 32, 32)
    assert_close(for_inference(model, strict=True)(x), model(x).detach(), 1e-5)


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda switches: "+".join(switches))
def test_explanations_are_those_of_the_parts(switches):
    plain, fused, x = make(), make(**switches), torch.randn(2, 3, 32, 32)
    fused.load_state_dict(plain.state_dict())
    wanted, got = inner_losses(plain, x), inner_losses(fused, x)
    assert list(got) == list(wanted) == ["blocks.0.mixer.ttt", "blocks.1.mixer.ttt"]
    for name in wanted:
        assert_close(got[name], wanted[name], 1e-5)
    assert_close(gradient_magnitude(fused, x), gradient_magnitude(plain, x), 1e-4)


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda switches: "+".join(switches))
def test_unfused_it_calls_its_parts(switches):
    plain, fused, x = make(), make(**switches), torch.randn(2, 3, 32, 32)
    fused.load_state_dict(plain.state_dict())
    unfuse(fused)
    fired = []
    for name, module in fused.named_modules():
        module.register_forward_hook(lambda *_, name=name: fired.append(name))
    assert torch.equal(fused(x), plain(x))
    assert {"blocks.0.mlp.fc1", "blocks.1.mixer.ttt.learner"} <= set(fired)
