"""Explanation tools: they report what the inner learners do and leave the model as it was."""

import pytest
import timm
import torch
from sklearn.datasets import load_sample_image

from tolerances import assert_close
from vision_ttt import TTTLinear
from vision_ttt.explain import (
    gradient_magnitude_maps,
    inner_losses,
    top_fraction,
    trace_layers,
)
from vision_ttt.ops import ttt_linear


def nano(**options):
    torch.manual_seed(0)
    return timm.create_model("vittt_nano_patch4_32", num_classes=10, depth=2, **options)


@pytest.fixture
def images():
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_trace_names_every_layer_and_leaves_the_model_alone(images):
    model = nano(drop_path_rate=0.5).train()
    model.blocks[0].eval()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    traces = trace_layers(model, images)
    assert list(traces) == ["blocks.0.mixer.ttt", "blocks.1.mixer.ttt"]
    assert traces["blocks.1.mixer.ttt"].loss.shape == (3, 64, 6)
    assert model.training
    assert not model.blocks[0].training
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    again = trace_layers(model, images)  # evaluation mode: nothing is dropped at random
    assert torch.equal(again["blocks.1.mixer.ttt"].loss, traces["blocks.1.mixer.ttt"].loss)


def test_layers_called_by_keyword():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = TTTLinear(8, 2)

        def forward(self, x):
            return self.layer(x=x)

    assert list(trace_layers(Model(), torch.randn(1, 5, 8))) == ["layer"]


def test_the_model_is_released_when_it_fails():
    model = nano()
    with pytest.raises(ValueError, match="images must be"):
        trace_layers(model, torch.zeros(1, 1, 32, 32))
    assert model.training
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("design", ["conv2d", "conv1d"])
def test_inner_losses_are_in_scan_order_of_each_direction(images, design):
    model = nano(design=design)
    losses = inner_losses(model, images)["blocks.0.mixer.ttt"]
    loss = trace_layers(model, images)["blocks.0.mixer.ttt"].loss
    assert losses.shape == (4,)
    first = [loss[:, :16, :3]] + ([loss[:, 48:, 3:]] if design == "conv2d" else [])
    assert_close(losses[0], torch.stack(first).mean(), 1e-6)
    assert losses[1] < losses[0]  # something is learnt even from random weights


def test_models_without_ttt_layers_have_no_inner_losses():
    deit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1)
    assert inner_losses(deit, torch.zeros(1, 3, 32, 32)) == {}


@pytest.mark.parametrize("pool", ["avg", "double"])
@pytest.mark.parametrize("state", ["current", "initial", "final"])
def test_gradient_maps_lie_on_the_token_grid(images, pool, state):
    model = nano(global_pool=pool)
    maps = gradient_magnitude_maps(model, images, 1, state=state)
    layer, name = model.blocks[1].mixer.ttt, "blocks.1.mixer.ttt"
    trace = trace_layers(model, images)[name]
    norms = trace.gradient_norm if state == "current" else trace.initial_gradient_norm
    if state == "final":
        norms = gradients_of_autograd(model, layer, images)
    norms = norms.mean(-1)
    norms = norms[:, 1:-1] if pool == "double" else norms
    assert_close(maps, norms.reshape(3, 8, 8), 1e-6)


def gradients_of_autograd(model, layer, images):
    """‖∂/∂W ½‖f(k_t; W) − v_t‖²‖ at the state after all tokens, token by token: [B, T, H]."""
    problems = []
    handle = layer.register_forward_pre_hook(
        lambda layer, inputs: problems.append(layer.inner_problem(*inputs))
    )
    with torch.no_grad():
        model.eval()(images)
    handle.remove()
    (problem,) = problems
    _, (w, b, *_) = ttt_linear(**problem, return_state=True, backend="reference")

    def loss(w, b, k, v, weight, bias):
        z = torch.nn.functional.layer_norm(k @ w + b, k.shape, weight, bias, problem["eps"])
        return 0.5 * (k + z - v).square().sum()

    gradient = torch.func.grad(loss)
    for axes in ((None, None, 0, 0, None, None), (0, 0, 1, 1, 0, 0), (0, 0, 0, 0, None, None)):
        gradient = torch.func.vmap(gradient, axes)  # tokens, heads, images
    found = gradient(w, b, problem["k"], problem["v"], problem["ln_weight"], problem["ln_bias"])
    return found.flatten(-2).norm(dim=-1).transpose(1, 2).detach()


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
    model, photo = nano(dynamic_img_size=True), photograph(name, 4 * side)
    patches = torch.nn.functional.unfold(photo.mean(1, keepdim=True), 4, stride=4)
    contrast = patches.std(1)  # [1, T]: where there is something to see
    maps = gradient_magnitude_maps(model, (photo - 0.5) / 0.25)
    assert first_mini_batches_share(maps) < 2
    assert rank_correlation(maps, contrast) > 0.5
    scan = gradient_magnitude_maps(model, (photo - 0.5) / 0.25, state="current")
    assert first_mini_batches_share(scan) > 20  # what the default has to be free of


def test_gradient_maps_of_other_sizes():
    maps = gradient_magnitude_maps(nano(dynamic_img_size=True), torch.zeros(1, 3, 16, 48))
    assert maps.shape == (1, 4, 12)


def test_gradient_maps_refuse(images):
    with pytest.raises(TypeError, match="need a Vittt, got Linear"):
        gradient_magnitude_maps(torch.nn.Linear(1, 1), images)
    with pytest.raises(IndexError):
        gradient_magnitude_maps(nano(), images, 2)
    with pytest.raises(
        ValueError, match="state must be one of final, initial, current, got 'last'"
    ):
        gradient_magnitude_maps(nano(), images, state="last")
    with pytest.raises(TypeError, match=r"linear inner models .* block 1 has TTTMLP"):
        gradient_magnitude_maps(nano(inner_model="mlp"), images)


def test_top_fraction_marks_the_largest():
    maps = torch.arange(10.0).view(1, 2, 5)
    assert torch.equal(top_fraction(maps, 0.3).flatten().nonzero().flatten(), torch.arange(7, 10))
    assert top_fraction(maps, 0.01).sum() == 1
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\], got 0"):
        top_fraction(maps, 0)
