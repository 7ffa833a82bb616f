"""Explanation tools: they report what the inner learners do and leave the model as it was."""

import pytest
import timm
import torch
from torch import Tensor

from tolerances import assert_close
from vision_ttt import TTTLinear
from vision_ttt.explain import fast_weights, inner_loss_course, inner_losses, trace_layers
from vision_ttt.layers import TTTMLP


def nano(**options):
    torch.manual_seed(0)
    options = {"num_classes": 10, "embed_dim": 32, "num_heads": 2, "depth": 2, **options}
    return timm.create_model("vittt_nano_patch4_32", **options)


@pytest.fixture
def images():
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("inner_model", ["linear", "mlp"])
def test_trace_names_every_layer_and_leaves_the_model_alone(images, inner_model):
    model = nano(drop_path_rate=0.5, inner_model=inner_model).train()
    model.blocks[0].eval()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    given = images.clone()
    traces = trace_layers(model, images)
    assert list(traces) == ["blocks.0.mixer.ttt", "blocks.1.mixer.ttt"]
    assert traces["blocks.1.mixer.ttt"].loss.shape == (3, 64, 4)
    assert not traces["blocks.1.mixer.ttt"].loss.requires_grad
    assert model.training
    assert not model.blocks[0].training
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert torch.equal(images, given)
    again = trace_layers(model, images)  # evaluation mode: nothing is dropped at random
    assert torch.equal(again["blocks.1.mixer.ttt"].loss, traces["blocks.1.mixer.ttt"].loss)


@pytest.mark.parametrize("kind", [TTTLinear, TTTMLP])
def test_layers_called_by_keyword(kind):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = kind(8, 2)

        def forward(self, x):
            return self.layer(x=x)

    assert list(trace_layers(Model(), torch.randn(1, 5, 8))) == ["layer"]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_that_has_run_is_traced(images, in_place):
    model = nano(depth=1).eval()
    wanted = trace_layers(model, images)["blocks.0.mixer.ttt"].loss
    if in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    with torch.no_grad():
        model(images)
    (trace,) = trace_layers(model, images).values()
    assert torch.equal(trace.loss, wanted)


@pytest.mark.parametrize("look", [inner_losses, inner_loss_course, fast_weights])
def test_a_mean_over_no_image_is_refused(look):
    with pytest.raises(ValueError, match=r"at least one image, got \[0, 3, 32, 32\]"):
        look(nano(), torch.zeros(0, 3, 32, 32))


def test_the_model_is_released_when_it_fails():
    model = nano()
    with pytest.raises(ValueError, match="images must be"):
        trace_layers(model, torch.zeros(1, 1, 32, 32))
    assert model.training
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_one_direction_alone(images):
    """Vision-TTT's Fig. 11 has the forth direction alone."""
    model = nano()
    both, forth, back = (
        inner_losses(model, images, direction)["blocks.1.mixer.ttt"]
        for direction in (None, "forth", "back")
    )
    assert_close((forth + back) / 2, both, 1e-6)
    loss = trace_layers(model, images)["blocks.1.mixer.ttt"].loss
    assert_close(forth[0], loss[:, :16, :2].mean(), 1e-6)
    course = inner_loss_course(model, images, "back")["blocks.1.mixer.ttt"]
    assert_close(course.before[:16].mean(), back[0], 1e-6)
    one_way = nano(design="conv1d")
    assert torch.equal(*(inner_losses(one_way, images, way)["blocks.0.mixer.ttt"]
                         for way in (None, "forth")))  # fmt: skip
    with pytest.raises(ValueError, match="'back'; known are forth and back"):
        inner_losses(one_way, images, "back")


@pytest.mark.parametrize("design", ["conv2d", "conv1d"])
def test_inner_losses_are_in_scan_order_of_each_direction(images, design):
    model = nano(design=design)
    losses = inner_losses(model, images)["blocks.0.mixer.ttt"]
    loss = trace_layers(model, images)["blocks.0.mixer.ttt"].loss
    assert losses.shape == (4,)
    first = [loss[:, :16, :2]] + ([loss[:, 48:, 2:]] if design == "conv2d" else [])
    assert_close(losses[0], torch.stack(first).mean(), 1e-6)
    assert losses[1] < losses[0]  # something is learnt even from random weights


@pytest.mark.parametrize("inner_model", ["linear", "mlp"])
def test_courses_are_in_scan_order_of_each_direction(images, inner_model):
    """With mini-batches of 24 tokens, of which the last has 16."""
    model = nano(mini_batch_size=24, inner_model=inner_model)
    name = "blocks.1.mixer.ttt"
    course, trace = inner_loss_course(model, images)[name], trace_layers(model, images)[name]

    def mean(loss: Tensor) -> Tensor:
        return 0.5 * (loss[:, :, :2].mean((0, 2)) + loss[:, :, 2:].mean((0, 2)).flip(0))

    assert_close(course.initial, mean(trace.initial_loss), 1e-6)
    assert_close(course.before, mean(trace.loss), 1e-6)
    assert_close(course.updated, mean(trace.updated_loss), 1e-6)
    assert torch.equal(course.initial[:24], course.before[:24])  # no step has been made
    assert (course.updated < course.before).float().mean() > 0.9  # a step learns its own token
    losses = inner_losses(model, images)[name]
    assert_close(losses, torch.stack([x.mean() for x in course.before.split(24)]), 1e-6)


def test_models_without_ttt_layers_have_no_inner_losses():
    deit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1)
    assert inner_losses(deit, torch.zeros(1, 3, 32, 32)) == {}
    assert inner_loss_course(deit, torch.zeros(1, 3, 32, 32)) == {}
