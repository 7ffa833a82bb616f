"""Effective receptive fields: where they reach, and the numbers that describe them."""

import math

import pytest
import timm
import torch
from torch import nn

from explained_models import ConvStack, small_vit
from tolerances import assert_close
from vision_ttt import for_inference
from vision_ttt.explain import (
    anisotropy,
    centroid_offset,
    energy_within,
    radial_profile,
    receptive_field,
)
from vision_ttt.models import HViT3


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def small(name="vittt_nano_patch4_32", **options):
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "depth": 2}
    return timm.create_model(name, **{**sizes, "num_classes": 3, **options})


def conv(width, **options):
    layer = nn.Conv2d(1, 1, width, padding=width // 2, bias=False, **options)
    nn.init.ones_(layer.weight)
    return layer


def split_by_the_scan(field, row, column):
    """Responses to tokens after one in the scan, and those to itself and the tokens before."""
    tokens = field.unfold(0, 4, 4).unfold(1, 4, 4).flatten(0, 1)  # [T, 4, 4]
    place = 8 * row + column + 1
    return tokens[place:], tokens[:place]


@pytest.mark.parametrize("design", ["ttt_layer", "conv1d"])
def test_one_direction_has_no_response_to_later_tokens(images, design):
    model = small(num_heads=2, design=design)
    later, earlier = split_by_the_scan(receptive_field(model, images, token=(4, 3)), 4, 3)
    assert (later == 0).all()
    assert (earlier.flatten(1).amax(1) > 0).all()


@pytest.mark.parametrize("design", ["dual", "conv2d"])
def test_both_directions_respond_to_all_tokens(images, design):
    model = small(num_heads=2, design=design)
    later, earlier = split_by_the_scan(receptive_field(model, images, token=(4, 3)), 4, 3)
    assert (later.flatten(1).amax(1) > 0).all()
    assert (earlier.flatten(1).amax(1) > 0).all()


def test_field_of_a_convolution_stack_is_known():
    model = ConvStack(conv(3), conv(3))
    field = receptive_field(model, torch.randn(2, 1, 9, 11), token=(3, 5))
    line = torch.tensor([1.0, 2.0, 3.0, 2.0, 1.0])
    wanted = torch.zeros(9, 11)
    wanted[1:6, 3:8] = line[:, None] * line
    assert torch.equal(field, wanted)
    strided = ConvStack(conv(3, stride=2), conv(3))
    field = receptive_field(strided, torch.randn(1, 1, 16, 16), token=(4, 4))
    rows, columns = field.nonzero().unbind(1)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (5, 11, 5, 11)  # 7 around 8


def test_responses_of_channels_do_not_cancel():
    layer = nn.Conv2d(2, 1, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, -2.0]).view(1, 2, 1, 1))
    field = receptive_field(ConvStack(layer), torch.randn(1, 2, 3, 3))
    assert field[1, 1] == field.sum() == 3


@pytest.mark.parametrize(("sides", "tokens"), [((8, 8), 4), ((8, 7), 2), ((7, 7), 1)])
def test_the_centre_is_the_middle_of_every_grid(sides, tokens):
    field = receptive_field(ConvStack(conv(1)), torch.randn(1, 1, *sides))
    assert (field > 0).sum() == tokens
    assert_close(field, field.flip(0).flip(1), 1e-6)
    assert field.sum() == pytest.approx(1)


def test_a_field_is_the_mean_over_images():
    class Square(nn.Module):
        def forward(self, x):
            return x.square()

    images = torch.randn(11, 1, 5, 5)
    field = receptive_field(ConvStack(Square()), images)
    assert_close(field[2, 2], 2 * images[:, 0, 2, 2].abs().mean(), 1e-6)


@pytest.mark.parametrize("name", ["vit3_tiny_patch16_224", "vim_nano_patch4_32", "hvit3"])
def test_fields_of_other_backbones(images, name):
    if name == "hvit3":
        torch.manual_seed(0)
        model = HViT3(32, 3, dims=(16, 16), depths=(1, 1), num_heads=(1, 1))
    else:
        options = {"img_size": 32, "patch_size": 4, "num_heads": 2} if "vit3" in name else {}
        model = small(name, depth=1, **options)
    field = receptive_field(model, images)
    assert (field.shape, field.dtype) == ((32, 32), torch.float32)
    assert field[12:20, 12:20].mean() > 1.2 * field.mean()


def test_fields_of_timms_transformer_and_resnet(images):
    assert (receptive_field(small_vit(), images[..., :16, :16]) > 0).all()  # attention is global
    torch.manual_seed(0)
    resnet = timm.models.ResNet(timm.models.resnet.BasicBlock, (1, 1, 1, 1), channels=(4,) * 4)
    field = receptive_field(resnet, images)
    assert field.shape == (32, 32)
    assert field.sum() > 0


def test_the_model_stays_as_it_was(images):
    model = small(num_heads=2, drop_path_rate=0.5).train()
    model.blocks[0].eval()
    model.norm.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with torch.no_grad():
        field = receptive_field(model, images)
    assert not field.requires_grad
    assert not images.requires_grad
    assert (model.training, model.blocks[0].training) == (True, False)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert (model.head.weight.grad == 1).all()
    assert all(x.grad is None for name, x in model.named_parameters() if name != "head.weight")
    assert not model.norm.weight.requires_grad
    assert torch.equal(field, receptive_field(model, images))  # nothing is dropped at random


def test_fields_in_bfloat16(images):
    model = small(num_heads=2)
    with torch.no_grad():  # TTT adds little to the fields of a new model
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    wanted = receptive_field(model, images)
    field = receptive_field(model.bfloat16(), images.bfloat16())
    assert field.dtype == torch.float32
    assert_close(field, wanted, 2e-2)


def test_fields_refuse(images):
    model = ConvStack(conv(1))
    with pytest.raises(TypeError, match=r"forward_intermediates .*, got Linear"):
        receptive_field(nn.Linear(1, 1), images)
    with pytest.raises(ValueError, match=r"\[B, C, H, W\] .* got \[3, 32, 32\]"):
        receptive_field(model, images[0])
    with pytest.raises(ValueError, match=r"at least 1, got \[0, 1, 4, 4\]"):
        receptive_field(model, torch.zeros(0, 1, 4, 4))
    with pytest.raises(ValueError, match="do not fit the model"):
        receptive_field(small_vit(), images)
    for token in ("center", (1, 2, 3)):
        with pytest.raises(ValueError, match="token must be 'centre' or"):
            receptive_field(model, images[:, :1], token=token)
    for token in ((32, 0), (0, -1)):
        with pytest.raises(ValueError, match="within the grid of 32 × 32 tokens"):
            receptive_field(model, images[:, :1], token=token)
    with pytest.raises(TypeError, match="a model of for_inference cannot be explained"):
        receptive_field(for_inference(model.eval()), images[:, :1])
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"within torch\.inference_mode"):
        receptive_field(model, images[:, :1])


def gaussian(side, along, across, turned=0.0):
    """A Gaussian of these deviations, in pixels, its long axis turned by an angle."""
    offsets = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    down, right = torch.meshgrid(offsets, offsets, indexing="ij")
    u = math.cos(turned) * right + math.sin(turned) * down
    v = math.cos(turned) * down - math.sin(turned) * right
    return (-(u**2) / (2 * along**2) - v**2 / (2 * across**2)).exp().float()


@pytest.mark.parametrize("turned", [0.0, 0.5, math.pi / 2])
@pytest.mark.parametrize("ratio", [1, 2, 3.5])
def test_anisotropy_is_the_ratio_of_a_fields_axes(ratio, turned):
    assert anisotropy(gaussian(101, 3 * ratio, 3, turned)) == pytest.approx(ratio, rel=1e-3)


def test_anisotropy_of_few_pixels():
    field = torch.zeros(5, 7)
    field[3, 2] = 1
    assert anisotropy(field) == 1
    field[3, 4] = 1
    assert anisotropy(field) == math.inf


def test_energy_within_a_radius():
    for radius in (3, 6, 12):
        expected = 1 - math.exp(-(radius**2) / (2 * 6**2))
        assert energy_within(gaussian(101, 6, 6), radius) == pytest.approx(expected, abs=0.01)
    even = torch.ones(4, 4)
    assert [energy_within(even, r) for r in (0, 0.75, 1.6, 3)] == [0, 0.25, 0.75, 1]
    corner = torch.zeros(4, 4)
    corner[0, 0] = 2
    assert energy_within(corner, 1) == 0
    assert energy_within(corner, 0, centre=(0, 0)) == 1


def test_radial_profile_is_the_mean_of_each_ring():
    assert torch.equal(radial_profile(torch.ones(6, 9)), torch.ones(5))  # √22 to a corner
    field = torch.zeros(5, 5)
    field[2, 4] = 8  # one of 16 pixels at distances from 2 to below 3
    assert torch.equal(radial_profile(field), torch.tensor([0, 0, 0.5]))
    assert torch.equal(radial_profile(field, centre=(2, 4))[:2], torch.tensor([8.0, 0]))


def test_the_centroid_shows_one_direction():
    field = torch.zeros(5, 5)
    field[0, 1] = field[0, 3] = 1
    assert centroid_offset(field) == (-2, 0)
    assert centroid_offset(field, centre=(0, 0)) == (0, 2)


@pytest.mark.parametrize("bad", [torch.zeros(3, 3), -torch.eye(3), torch.ones(3), torch.eye(2) / 0])
def test_numbers_refuse_what_is_no_field(bad):
    for number in (anisotropy, radial_profile, centroid_offset, lambda f: energy_within(f, 1)):
        with pytest.raises(ValueError, match="a field must be"):
            number(bad)


def test_numbers_refuse_other_places():
    with pytest.raises(ValueError, match="radius must be at least 0, got -1"):
        energy_within(torch.ones(3, 3), -1)
    with pytest.raises(ValueError, match=r"within the field of 3 × 3 pixels, got \(3, 1\)"):
        energy_within(torch.ones(3, 3), 1, centre=(3, 1))
