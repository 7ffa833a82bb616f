"""TTT layers with other inner learners than the linear one: TTT-MLP and generic ones."""

from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F

from tolerances import assert_close
from vision_ttt import for_training
from vision_ttt.inner import (
    MLP,
    DepthwiseConv3x3,
    Learner,
    Linear,
    NormedResidual,
    SimplifiedGLU,
    dot_product,
    squared_error,
)
from vision_ttt.layers import (
    TTTMLP,
    FunctionalLearner,
    LinearLearner,
    MLPLearner,
    TTTLayer,
    TTTLinear,
    VitttBlock,
    VitttMixer,
    warm_up_inner_rates,
)
from vision_ttt.ops import ttt_mlp

EVERYTHING = {"bidirectional": True, "share_qk": True, "conv_kernel_size": 4, "gate": True}


def shaken(module):
    """In float64, with no parameter at a value that hides its use."""
    torch.manual_seed(0)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def test_causal_mlp_layer_is_its_description():
    """Projections, rates at η_base = 0.1, op, post norm, output."""
    layer = shaken(TTTMLP(12, 3, mini_batch_size=5))
    assert layer.base_learning_rate == 0.1
    x = torch.randn(2, 13, 12, dtype=torch.float64)
    k, q, v = (x @ w.T for w in layer.in_proj.weight.split(12))
    eta = x @ layer.rate_proj.weight.T + layer.rate_proj.bias
    learner = layer.learner
    z = ttt_mlp(
        *(t.unflatten(-1, (3, 4)) for t in (q, k, v)),
        0.1 * torch.sigmoid(eta) / 4,
        *(learner.w1, learner.b1, learner.w2, learner.b2),
        *(learner.norm_weight, learner.norm_bias),
        mini_batch_size=5,
        position_scale=(1 / torch.arange(1, 6).double() + learner.position_offset[0]).clamp(min=0),
        backend="reference",
    ).flatten(2)
    z = F.layer_norm(z, (12,), layer.merge.weight[0], layer.merge.bias[0], 1e-6)
    assert_close(layer(x), z @ layer.out_proj.weight.T, 1e-12)


@pytest.mark.parametrize("states", [0, 1, 2, None])
def test_mlp_learner_holds_a_state_of_four_tensors(states):
    learner = MLPLearner(3, 4, directions=2, learnable_states=states)
    learnt = {n: x for n, x in learner.named_parameters() if n in ("w1", "b1", "w2", "b2")}
    assert len(learnt) == (0 if states == 0 else 4)
    problem = learner.problem(*torch.randn(3, 1, 5, 6, 4), torch.rand(1, 5, 6))
    shapes = {n: tuple(problem[n].shape) for n in ("w1", "b1", "w2", "b2")}
    assert shapes == {"w1": (6, 4, 16), "b1": (6, 16), "w2": (6, 16, 4), "b2": (6, 4)}
    for name in ("w1", "w2"):
        assert 0.01 < problem[name].std() < 0.03
        assert torch.equal(*problem[name].chunk(2)) == (states == 1)
    assert {"w1", "b1", "w2", "b2"} <= set(learner.state_dict())


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["bare", "everything"])
def test_every_parameter_of_the_mlp_layer_is_used(options):
    layer = shaken(TTTMLP(8, 2, mini_batch_size=4, **options))
    layer(torch.randn(2, 11, 8, dtype=torch.float64)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    for part in layer.in_proj.weight.grad.split(list(layer.widths.values())):
        assert part.numel() == 0 or part.abs().sum() > 0


@pytest.mark.parametrize("bidirectional", [False, True])
def test_mlp_layer_sees_what_its_directions_show(bidirectional):
    layer = TTTMLP(8, 2, bidirectional=bidirectional).double()
    x = torch.randn(2, 21, 8, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x)[0, 10].sum(), x)
    assert gradient[0, :10].abs().sum() > 0
    assert (gradient[0, 11:].abs().sum() > 0) == bidirectional
    assert gradient[1].abs().sum() == 0


def test_vittt_block_with_mlp_inner_models():
    """The block of Vittt with another inner model; also in one compiled graph."""
    torch.manual_seed(0)
    block = VitttBlock(VitttMixer(16, ttt=TTTMLP(16, 2, **EVERYTHING)), 16, 24)
    y = torch.randn(2, 35, 16)
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    assert_close(compiled(y, (5, 7)), block(y, (5, 7)), 1e-5)
    with torch.no_grad():  # its convolution is a hundred times as large as what is learnt
        for parameter in block.mixer.conv2d.parameters():
            parameter.zero_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = block(y, (5, 7))
    assert_close(got - y, block(y, (5, 7)) - y, 3e-2)


def test_rates_are_float32_in_low_precision():
    layer = TTTMLP(32, 2).bfloat16()
    problem = layer.inner_problem(torch.randn(1, 20, 32, dtype=torch.bfloat16))
    assert problem["q"].dtype == torch.bfloat16
    assert problem["eta"].dtype == problem["position_scale"].dtype == torch.float32


def test_warm_up_scales_the_inner_rates_and_nothing_else():
    model = torch.nn.Sequential(TTTMLP(8, 2), TTTLinear(8, 2))
    x = torch.randn(1, 9, 8)
    before = [layer.inner_problem(x) for layer in model]
    saved = model.state_dict()
    warm_up_inner_rates(model, 0.25)
    after = [layer.inner_problem(x) for layer in model]
    assert_close(after[0]["eta"], 0.25 * before[0]["eta"], 1e-7)
    assert torch.equal(after[1]["eta"], before[1]["eta"])
    assert torch.equal(after[0]["q"], before[0]["q"])
    assert set(saved) == set(model.state_dict())
    assert not any("warmup" in name for name in saved)
    warm_up_inner_rates(model, 0.25)
    model.to_empty(device="cpu").load_state_dict(saved)
    assert all(layer.warmup == 0.25 for layer in model.modules() if isinstance(layer, TTTMLP))
    warm_up_inner_rates(model, 1.0)
    assert torch.equal(model[0].inner_problem(x)["eta"], before[0]["eta"])
    with pytest.raises(ValueError, match=r"fraction must be in 0 … 1, got 1.5"):
        warm_up_inner_rates(model, 1.5)


def test_warm_up_does_not_compile_again():
    layer, graphs = TTTMLP(8, 2), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, backend=count)
    x = torch.randn(1, 9, 8)
    with torch.no_grad():
        outputs = []
        for fraction in (0.0, 0.5, 1.0):
            warm_up_inner_rates(layer, fraction)
            outputs.append(compiled(x))
            assert_close(outputs[-1], layer(x), 1e-6)
    assert len(graphs) == 1
    assert not torch.equal(outputs[0], outputs[2])


def copy_parameters(source, target, names):
    """Fill the generic learner's parameters from a fast learner's."""
    with torch.no_grad():
        for own, name in names.items():
            parameter = target.state[own] if own in target.state else target.outer[own]
            parameter.copy_(getattr(source, name))


@pytest.mark.parametrize(
    ("fast", "model", "names"),
    [
        (LinearLearner, Linear(), {"w": "w0", "b": "b0"}),
        (MLPLearner, MLP(), {name: name for name in ("w1", "b1", "w2", "b2")}),
    ],
)
def test_a_layer_with_the_generic_learner_is_the_layer_with_the_fast_one(fast, model, names):
    """Only the fast learners have a position scale: all ones here."""
    layer = shaken(TTTLayer(8, 2, partial(fast, mini_batch_size=4), **EVERYTHING))
    with torch.no_grad():
        steps = 1 / torch.arange(1, 5, dtype=torch.float64)
        layer.learner.position_offset.copy_((1 - steps).expand(2, 4))
    learner = Learner(NormedResidual(model), squared_error, mini_batch_size=4, causal=True)
    generic = TTTLayer(8, 2, partial(FunctionalLearner, learner=learner), **EVERYTHING).double()
    own = {n: x for n, x in layer.state_dict().items() if not n.startswith("learner.")}
    generic.load_state_dict(own, strict=False)
    names = names | {"ln_weight": "norm_weight", "ln_bias": "norm_bias"}
    copy_parameters(layer.learner, generic.learner, names)
    x = torch.randn(2, 11, 8, dtype=torch.float64)
    assert_close(generic(x), layer(x), 1e-11)


def test_a_layer_of_published_vit3_parts_trains():
    """Full batches, no order among the tokens, a convolution on the grid among the inner models."""
    torch.manual_seed(0)
    for model in (SimplifiedGLU(), DepthwiseConv3x3((3, 4))):
        learner = Learner(model, dot_product, clip_axes=model.clip_axes)
        layer = TTTLayer(8, 2, partial(FunctionalLearner, learner=learner))
        x, target = torch.randn(2, 2, 12, 8)
        optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
        losses = []
        for _ in range(30):
            loss = (layer(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert all(p.grad is not None for p in layer.parameters())
        assert losses[-1] < 0.9 * losses[0]


def test_functional_learner_refuses():
    with pytest.raises(TypeError, match="must be an InnerModel, which has an initial state; got"):
        FunctionalLearner(2, 4, learner=Learner(lambda params, x: x))
    with pytest.raises(ValueError, match="directions must be 1 or 2, got 3"):
        FunctionalLearner(2, 4, learner=Learner(Linear()), directions=3)


def test_layer_refuses():
    with pytest.raises(ValueError, match="conv_kernel_size must be at least 0, got -1"):
        TTTLinear(32, 2, conv_kernel_size=-1)
    with pytest.raises(ValueError, match="dim must be a multiple of num_heads, got 10 and 3"):
        TTTMLP(10, 3)
    with pytest.raises(TypeError, match="minibatch"):
        TTTMLP(12, 3, minibatch=4)


@pytest.mark.parametrize("layer_class", [TTTLinear, TTTMLP])
def test_layer_replaces_the_attention_of_a_vit_of_timm(layer_class):
    model = timm.create_model("test_vit").eval()
    plain = model(torch.ones(1, 3, 160, 160))
    for block in model.blocks:
        block.attn = layer_class(model.embed_dim, 2, **EVERYTHING)
    for network in (model, for_training(model)):
        logits = network.train()(torch.ones(1, 3, 160, 160))
        assert logits.shape == plain.shape
        assert logits.isfinite().all()
        logits.sum().backward()
        with pytest.raises(ValueError, match="attn_mask must be None"):
            network(torch.ones(1, 3, 160, 160), attn_mask=torch.ones(1, 1, 101, 101).bool())
        with pytest.raises(ValueError, match="is_causal=True requires a layer with bidirec"):
            network(torch.ones(1, 3, 160, 160), is_causal=True)
    causal, x = layer_class(8, 2).double(), torch.randn(1, 5, 8).double()
    torch.testing.assert_close(causal(x, is_causal=True), causal(x), atol=0, rtol=0)
