"""Gradient magnitude maps: every token's own, on the grid, for every TTT model."""

import re

import pytest
import timm
import torch
from sklearn.datasets import load_sample_image

from tolerances import assert_close
from vision_ttt import for_inference, linearize
from vision_ttt.explain import (
    fast_weights,
    gradient_layers,
    gradient_magnitude,
    mean_map,
    top_fraction,
    trace_layers,
)
from vision_ttt.layers import attention_inner
from vision_ttt.models import HViT3, ViT3
from vision_ttt.ops import ttt_linear, ttt_mlp
from vision_ttt.ops.swiglu_ttt import swiglu_ttt_gradient_norms
from vision_ttt.ops.ttt_linear import ttt_linear_trace
from vision_ttt.ops.vit3_ttt import depthwise_gradient_norms, gated_unit_gradient_norms

STATES = ("final", "initial", "current")


def nano(**options):
    torch.manual_seed(0)
    options = {"num_classes": 10, "embed_dim": 32, "num_heads": 2, "depth": 2, **options}
    return timm.create_model("vittt_nano_patch4_32", **options)


def vit3():
    torch.manual_seed(0)
    sizes = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    return ViT3(img_size=32, **sizes)


def h_vit3():
    torch.manual_seed(0)
    sizes = {"dims": (16, 16, 32), "depths": (1, 1, 2), "num_heads": (1, 1, 2), "num_classes": 3}
    return HViT3(img_size=32, **sizes)


def linear(inner="swiglu"):
    """A linearised ViT with registers among its tokens."""
    torch.manual_seed(0)
    sizes = {"patch_size": 4, "img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2}
    vit = timm.create_model("vit_small_patch14_reg4_dinov2", num_classes=3, **sizes)
    return linearize(vit, inner)


@pytest.fixture
def images():
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def oblong():
    """Images of 6 × 10 tokens: on a square grid rows and columns could be exchanged."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 3, 24, 40, generator=generator, dtype=torch.float64)


def problem_of(model, layer, images):
    """The arguments of the op of one of a model's layers."""
    problems = []
    handle = layer.register_forward_pre_hook(
        lambda layer, inputs: problems.append(layer.inner_problem(*inputs))
    )
    with torch.no_grad():
        model.eval()(images)
    handle.remove()
    (problem,) = problems
    return problem


def gradients_of_autograd(problem):
    """‖∂/∂W ½‖f(k_t; W) − v_t‖²‖ at the state after all tokens, token by token: [B, T, H]."""
    names = [name for name in ("w0", "b0", "w1", "b1", "w2", "b2") if name in problem]
    run = ttt_linear if len(names) == 2 else ttt_mlp
    _, state = run(**problem, return_state=True, backend="reference")

    def loss(state, k, v, weight, bias):
        z = k @ state[0] + state[1]
        if len(state) == 4:
            z = torch.nn.functional.gelu(z, approximate="tanh") @ state[2] + state[3]
        z = torch.nn.functional.layer_norm(z, k.shape, weight, bias, problem["eps"])
        return 0.5 * (k + z - v).square().sum()

    gradient = torch.func.grad(loss)
    for axes in ((None, 0, 0, None, None), (0, 1, 1, 0, 0), (0, 0, 0, None, None)):
        gradient = torch.func.vmap(gradient, axes)  # tokens, heads, images
    others = (problem[name] for name in ("k", "v", "ln_weight", "ln_bias"))
    found = gradient(state[: len(names)], *others)
    weights = torch.cat([x.flatten(3) for x in found[::2]], dim=-1)  # without biases
    return weights.norm(dim=-1).transpose(1, 2).detach()


@pytest.mark.parametrize(
    ("inner_model", "pool"), [("linear", "avg"), ("linear", "double"), ("mlp", "double")]
)
def test_maps_are_of_each_layer_head_and_token(images, inner_model, pool):
    model, images = nano(global_pool=pool, inner_model=inner_model), images[:2]
    found = {state: gradient_magnitude(model, images, state=state) for state in STATES}
    assert torch.equal(gradient_magnitude(model, images), found["initial"])
    for index, trace in enumerate(trace_layers(model, images).values()):
        problem = problem_of(model, model.blocks[index].mixer.ttt, images)
        wanted = {
            "final": gradients_of_autograd(problem),
            "initial": trace.initial_gradient_norm,
            "current": trace.gradient_norm,
        }
        for state, norms in wanted.items():
            norms = norms[:, 1:-1] if pool == "double" else norms  # [B, T, heads]
            maps = norms.transpose(1, 2).unflatten(2, (8, 8))
            assert_close(found[state][:, index], maps, 1e-5, state)


@pytest.mark.parametrize("inner_model", ["linear", "mlp"])
def test_states_differ(images, inner_model):
    model = nano(inner_model=inner_model)
    maps = [gradient_magnitude(model, images, state=state) for state in STATES]
    assert not torch.allclose(maps[0], maps[1], rtol=1e-3)
    assert not torch.allclose(maps[1], maps[2], rtol=1e-3)
    first = maps[1][:, :, :2].flatten(3)[..., :16], maps[2][:, :, :2].flatten(3)[..., :16]
    assert_close(*first, 1e-6)  # before any step, the current state is the initial one


def test_a_vit3_has_a_map_of_each_head_and_of_the_convolution():
    model, images = vit3().double(), oblong()
    maps = gradient_magnitude(model, images)
    assert maps.shape == (3, 2, 3, 6, 10)
    calls = []
    layer = model.blocks[1].ttt
    handle = layer.register_forward_pre_hook(lambda layer, inputs: calls.append(inputs))
    model.eval()(images)
    handle.remove()
    (_, k1, v1), (_, k2, v2) = layer.views(calls[0][0].detach())
    # The batch's gradient by autograd, with the loss of one token after the other.
    for t in (0, 13, 59):
        z1, z2 = k1[:, t].unsqueeze(-2) @ layer.w1, k1[:, t].unsqueeze(-2) @ layer.w2
        f = (z1 * torch.nn.functional.silu(z2)).squeeze(-2)  # [B, H, d]
        loss = -(f * v1[:, t]).sum((-2, -1)) / 3 / 60
        o = torch.nn.functional.conv2d(
            k2.transpose(1, 2).unflatten(2, (6, 10)), layer.w3, padding=1, groups=8
        )
        loss2 = -(o.flatten(2)[..., t] * v2[:, t]).sum(-1) / 3 / 60
        for image in range(3):
            w1, w2 = torch.autograd.grad(loss[image], (layer.w1, layer.w2), retain_graph=True)
            (w3,) = torch.autograd.grad(loss2[image], layer.w3, retain_graph=True)
            norms = [*torch.cat((w1, w2), -1).flatten(1).norm(dim=1), w3.norm()]
            assert_close(maps[image, 1].flatten(1)[:, t], torch.stack(norms).float(), 1e-6)


@pytest.mark.parametrize("inner", ["swiglu", "ttt_linear", "vit3"])
def test_a_linear_vit_has_maps_of_what_its_inner_models_are_trained_on(inner, monkeypatch):
    model, images = linear(inner).double(), oblong()
    maps = gradient_magnitude(model, images)
    seen = {}  # what the ops of the last layer are called with
    for name in ("swiglu_ttt", "gated_unit_step", "depthwise_step"):
        op = getattr(attention_inner, name)
        monkeypatch.setattr(
            attention_inner, name, lambda *x, op=op, name=name: seen.update({name: x}) or op(*x)
        )
    if inner == "ttt_linear":
        learner = model.blocks[1].attn.inner.learner
        learner.register_forward_pre_hook(lambda _, views: seen.update(views=views))
    model.eval()(images)
    if inner == "swiglu":
        wanted = swiglu_ttt_gradient_norms(*seen["swiglu_ttt"][1:])[:, 4:]  # without registers
    elif inner == "ttt_linear":
        trace = ttt_linear_trace(**learner.problem(*seen["views"]))
        wanted = trace.initial_gradient_norm[:, 4:]
    else:
        (k2, v2, *_), gated = seen["depthwise_step"], seen["gated_unit_step"]
        convolved = depthwise_gradient_norms(k2, v2, (6, 10), 3).unsqueeze(-1)
        wanted = torch.cat((gated_unit_gradient_norms(*gated)[:, 4:], convolved), dim=-1)
    assert wanted.shape[2] == {"swiglu": 2, "ttt_linear": 4, "vit3": 3}[inner]
    assert_close(maps[:, 1].flatten(2).mT, wanted.float(), 1e-6)


def test_an_h_vit3_has_maps_of_one_stage():
    model = h_vit3()
    images = torch.randn(1, 3, 70, 90)
    assert list(gradient_layers(model)) == [
        *("stages.0.blocks.0.ttt", "stages.1.blocks.0.ttt"),
        *("stages.2.blocks.0.ttt", "stages.2.blocks.1.ttt"),
    ]
    assert gradient_magnitude(model, images).shape == (1, 2, 3, 5, 6)
    assert gradient_magnitude(model, images, layers=[0]).shape == (1, 1, 2, 18, 23)
    with pytest.raises(
        ValueError, match=r"stages.0.blocks.0.ttt: \[2, 18, 23\], .*1.ttt: \[3, 5, 6\]"
    ):
        gradient_magnitude(model, images, layers=[0, -1])


@pytest.mark.parametrize("make", [nano, vit3, linear], ids=["vittt", "vit3", "linear"])
def test_layers_are_chosen_by_index(images, make):
    model = make()
    every = gradient_magnitude(model, images)
    assert torch.equal(gradient_magnitude(model, images, layers=[-1, 0]), every.flip(1))
    assert gradient_magnitude(model, images, layers=[1]).shape[1] == 1


@pytest.mark.parametrize("make", [nano, vit3, linear], ids=["vittt", "vit3", "linear"])
def test_maps_of_other_sizes_and_of_half_precision(make):
    model = make(dynamic_img_size=True) if make is nano else make()
    images = torch.randn(1, 3, 16, 48)
    maps = gradient_magnitude(model, images)
    assert maps.shape[-2:] == (4, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gradient_magnitude(model, images)
    assert got.dtype == torch.float32
    assert_close(got, maps, 2e-2)
    got = gradient_magnitude(model.bfloat16(), images.bfloat16())
    assert got.dtype == torch.float32
    assert_close(got, maps, 2e-2)


def test_the_model_is_left_alone(images):
    model = nano(drop_path_rate=0.5).train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    gradient_magnitude(model, images)
    with pytest.raises(ValueError, match="images must be"):
        gradient_magnitude(model, images[:, :1])
    assert all(module.training for module in model.modules())
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def photograph(name, side):
    """The middle of one of scikit-learn's photographs: [1, 3, side, side] in [0, 1]."""
    whole = torch.from_numpy(load_sample_image(name).copy()).permute(2, 0, 1)[None] / 255
    square = torch.nn.functional.interpolate(
        whole[..., 106:534], (side, side), mode="bicubic", antialias=True
    )
    return square.clamp(0, 1)


def first_mini_batches_share(maps):
    """Of ‖G‖²: that of the 16 tokens which a direction meets first, over an even share."""
    energy = maps.flatten().double().square()
    return (energy[:16].sum() + energy[-16:].sum()) / energy.sum() / (32 / len(energy))


def rank_correlation(a, b):
    ranks = torch.stack([x.flatten().argsort().argsort() for x in (a, b)])
    return torch.corrcoef(ranks.double())[0, 1]


@pytest.mark.parametrize("side", [32, 64])
@pytest.mark.parametrize("name", ["china.jpg", "flower.jpg"])
def test_maps_of_a_photograph_show_it_and_not_the_scan(name, side):
    model = nano(embed_dim=96, num_heads=3, dynamic_img_size=True)
    photo = photograph(name, 4 * side)
    patches = torch.nn.functional.unfold(photo.mean(1, keepdim=True), 4, stride=4)
    contrast = patches.std(1)  # [1, T]: where there is something to see
    normalised = (photo - 0.5) / 0.25
    maps = mean_map(gradient_magnitude(model, normalised, state="final", layers=[-1]))
    assert first_mini_batches_share(maps) < 2
    assert rank_correlation(maps, contrast) > 0.5
    scan = mean_map(gradient_magnitude(model, normalised, state="current", layers=[-1]))
    assert first_mini_batches_share(scan) > 20
    # What the default has to be free of; of the two states that are it is the better measured one.
    default = mean_map(gradient_magnitude(model, normalised, layers=[-1]))
    assert first_mini_batches_share(default) < 2


class TwoModels(torch.nn.Module):
    """Runs the first only."""

    def __init__(self, model, other):
        super().__init__()
        self.model, self.other = model, other

    def forward(self, x):
        return self.model(x)


def test_gradient_magnitude_refuses(images):
    with pytest.raises(TypeError, match=r"need a model with TTT layers, .* got Linear"):
        gradient_magnitude(torch.nn.Linear(1, 1), images)
    with pytest.raises(TypeError, match=r"does not call its layer other.blocks.0.mixer"):
        gradient_magnitude(TwoModels(nano(), nano()), images)
    packed = for_inference(nano(mlp_ratio=2.0))
    for explain in (gradient_magnitude, trace_layers, fast_weights):
        with pytest.raises(TypeError, match="a model of for_inference cannot be explained"):
            explain(packed, images)
    for layers in ([0, 2], []):
        message = rf"indices of the model's 2 layers, at least one; got {re.escape(str(layers))}"
        with pytest.raises(IndexError, match=message):
            gradient_magnitude(nano(), images, layers=layers)
    with pytest.raises(
        ValueError, match=r"state must be one of final, initial, current .* got 'last'"
    ):
        gradient_magnitude(nano(), images, state="last")
    for model, name in ((vit3(), "ViT3TTT"), (linear(), "SwiGLUInner")):
        with pytest.raises(ValueError, match=f"must be one of initial for a {name}, got 'final'"):
            gradient_magnitude(model, images, state="final")


def test_mean_map():
    magnitude = torch.rand(2, 3, 4, 5, 6)
    assert_close(mean_map(magnitude), magnitude[:, 2].mean(1), 1e-6)
    assert_close(mean_map(magnitude, 2), magnitude[:, 1:].flatten(1, 2).mean(1), 1e-6)
    for last_layers in (0, 4):
        with pytest.raises(ValueError, match=rf"must be in 1 … 3, got {last_layers}"):
            mean_map(magnitude, last_layers)
    with pytest.raises(ValueError, match=r"must be \[B, layers, heads, h, w\], got \[2, 3, 4"):
        mean_map(magnitude[..., 0])


def test_top_fraction_marks_the_largest():
    maps = torch.arange(10.0).view(1, 2, 5)
    assert torch.equal(top_fraction(maps, 0.3).flatten().nonzero().flatten(), torch.arange(7, 10))
    assert top_fraction(maps, 0.01).sum() == 1
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\], got 0"):
        top_fraction(maps, 0)
