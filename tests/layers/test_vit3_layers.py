"""The layers of ViT³ and H-ViT³, against tensors of the released code and plain transcriptions."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tolerances import assert_close
from vision_ttt.layers import ConvMlp, Mlp, ResidualConv2d, ViT3Block, ViT3TTT
from vision_ttt.layers.rotary2d import rotary_table, rotate
from vision_ttt.ops.vit3_ttt import depthwise_step, gated_unit_step

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name):
    description = json.loads((GOLDEN / f"{name}.json").read_text())
    return load_file(GOLDEN / f"{name}.safetensors"), description


def released_layer(tensors, config):
    layer = ViT3TTT(config["dim"], config["num_heads"])
    weights = {key[8:]: x for key, x in tensors.items() if key.startswith("weights.")}
    weights |= {key: weights[key].squeeze(0) for key in ("w1", "w2")}
    layer.load_state_dict(weights)
    return layer


@pytest.mark.parametrize("name", ["vit3_ttt_block", "vit3_ttt_block_rope"])
def test_released_layer(name):
    tensors, description = golden(name)
    config, tolerance = description["config"], description["tolerance"]
    grid = (config["h"], config["w"])
    layer = released_layer(tensors, config)
    x = tensors["input.x"].requires_grad_()
    rotations = rotary_table(grid, config["dim"]) if config["rope"] else None
    y = layer(x, grid, rotations)
    assert_close(y, tensors["output.y"], tolerance["forward"], "y")
    with torch.no_grad():
        assert_close(layer(x, grid, rotations), y, 1e-6, "inference")

    (_, k1, v1), (_, k2, v2) = layer.views(x, rotations)
    w1, w2 = gated_unit_step(k1, v1, layer.w1, layer.w2)
    w3 = depthwise_step(k2, v2, layer.w3, grid)
    learnt = {"w1": w1, "w2": w2, "w3": w3.flatten(0, 1).unsqueeze(1)}
    for key, state in learnt.items():
        assert_close(state, tensors[f"output.{key}_new"], tolerance["forward"], key)

    (y * tensors["input.proj_y"]).sum().backward()
    gradients = {"input.x": x.grad} | {key: p.grad for key, p in layer.named_parameters()}
    assert len(gradients) == sum(key.startswith("output.grad.") for key in tensors)
    for key, gradient in gradients.items():
        wanted = tensors[f"output.grad.{key}"].view_as(gradient)
        assert_close(gradient, wanted, tolerance["gradients"], key)


def test_rotations_are_the_releases():
    tensors, _ = golden("vit3_ttt_block_rope")
    assert_close(rotary_table((7, 7), 96), tensors["input.rope_rotations"].flatten(0, 1), 1e-6)


def test_rotations_turn_rows_in_the_first_half_and_columns_in_the_second():
    x = torch.randn(2, 6, 8)
    turned = rotate(x, rotary_table((2, 3), 8))
    assert torch.equal(turned[:, 0], x[:, 0])
    assert torch.equal(turned[:, 1, :4], x[:, 1, :4])
    assert torch.equal(turned[:, 3, 4:], x[:, 3, 4:])
    pair = torch.view_as_complex(x[:, 5].unflatten(-1, (4, 2)))
    angles = torch.tensor([1, 0.01, 2, 0.02])  # row 1, column 2
    wanted = torch.view_as_real(pair * torch.polar(torch.ones(4), angles)).flatten(1)
    assert_close(turned[:, 5], wanted, 1e-6)
    assert rotate(x.bfloat16(), rotary_table((2, 3), 8)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="multiple of 4 channels, got 6"):
        rotary_table((2, 3), 6)


def test_layer_gradcheck():
    torch.manual_seed(0)
    layer = ViT3TTT(8, 2).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)
    rotations = rotary_table((2, 3), 8).double()
    assert torch.autograd.gradcheck(lambda x: layer(x, (2, 3), rotations), (x,), fast_mode=True)


def test_images_of_a_batch_learn_apart():
    torch.manual_seed(0)
    layer = ViT3TTT(32, 2)
    x = torch.randn(3, 12, 32)
    together = layer(x, (3, 4))
    for image in range(3):
        assert_close(layer(x[image : image + 1], (3, 4))[0], together[image], 1e-5)


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_qkv_bias(qkv_bias):
    assert (ViT3TTT(32, 2, qkv_bias=qkv_bias).qkv.bias is not None) == qkv_bias


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="dim must be a multiple of num_heads, got 32 and 3"):
        ViT3TTT(32, 3)
    with pytest.raises(ValueError, match="12 tokens do not fill a grid of 3 × 5"):
        ViT3TTT(32, 2)(torch.randn(1, 12, 32), (3, 5))
    with pytest.raises(ValueError, match="12 tokens do not fill a grid of 3 × 5"):
        ViT3Block(32, 2)(torch.randn(1, 12, 32), (3, 5))


@pytest.mark.parametrize("training", [True, False])
def test_residual_convolution(training):
    conv = ResidualConv2d(16)
    torch.nn.init.normal_(conv.bias)
    x = torch.randn(2, 12, 16)
    image = x.unflatten(1, (3, 4)).permute(0, 3, 1, 2)
    wanted = image + F.conv2d(image, conv.weight, conv.bias, padding=1, groups=16)
    with torch.set_grad_enabled(training):
        before = x.clone()
        assert_close(conv(x, (3, 4)), wanted.permute(0, 2, 3, 1).flatten(1, 2), 1e-5)
    assert torch.equal(x, before)


def test_mlps():
    x = torch.randn(2, 12, 16)
    mlp, conv_mlp = Mlp(16, 40), ConvMlp(16, 40)
    wanted = mlp.fc2(F.gelu(mlp.fc1(x)))
    assert_close(mlp(x, (3, 4)), wanted, 1e-6)
    hidden = F.gelu(conv_mlp.fc1(x))
    wanted = conv_mlp.fc2(F.gelu(conv_mlp.conv(hidden, (3, 4))))
    assert_close(conv_mlp(x, (3, 4)), wanted, 1e-6)


def block(width=32):
    torch.manual_seed(0)
    return ViT3Block(width, 2)


def shaken(layer):
    """A new block adds less than the rounding of what it is given."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def test_block_is_convolution_ttt_and_mlp_each_with_its_residual():
    layer = block().double()
    y = torch.randn(2, 12, 32, dtype=torch.float64)
    wanted = layer.cpe(y, (3, 4))
    wanted = wanted + layer.ttt(F.layer_norm(wanted, (32,), eps=1e-6), (3, 4))
    wanted = wanted + layer.mlp(F.layer_norm(wanted, (32,), eps=1e-6), (3, 4))
    assert_close(layer(y, (3, 4)), wanted, 1e-12)


def test_block_takes_its_parts_as_modules():
    """The mixer is called with the grid and the rotations, the position encoding with the grid."""

    class Part(torch.nn.Module):
        def forward(self, x, *others):
            calls.append(others)
            return 2 * x

    calls, mixer, cpe = [], Part(), Part()
    layer = ViT3Block(32, mixer=mixer, cpe=cpe).double()
    assert layer.ttt is mixer
    assert layer.cpe is cpe
    y = torch.randn(2, 12, 32, dtype=torch.float64)
    rotations = rotary_table((3, 4), 32)
    wanted = 2 * y
    wanted = wanted + 2 * F.layer_norm(wanted, (32,), eps=1e-6)
    wanted = wanted + layer.mlp(F.layer_norm(wanted, (32,), eps=1e-6), (3, 4))
    assert_close(layer(y, (3, 4), rotations), wanted, 1e-12)
    assert calls == [((3, 4),), ((3, 4), rotations)]


@pytest.mark.parametrize("given", [{}, {"num_heads": 2, "mixer": torch.nn.Identity()}])
def test_block_has_one_mixer(given):
    with pytest.raises(ValueError, match="give num_heads or mixer, one of them; got num_heads="):
        ViT3Block(32, **given)


def test_inference_is_the_same_and_keeps_its_input():
    layer, grid = shaken(block()), (40, 60)
    y = torch.randn(2, grid[0] * grid[1], 32)
    before = y.clone()
    wanted = layer(y, grid)
    with torch.no_grad():
        assert_close(layer(y, grid), wanted, 1e-5)
    assert torch.equal(y, before)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_survives_large_activations_and_keeps_the_residual_exact(dtype, training):
    layer = block()
    y = 100 * torch.randn(1, 400, 32)
    for convolution in (1, 0):  # its own rounding would hide that of the residual
        with torch.no_grad():
            for parameter in layer.cpe.parameters():
                parameter.mul_(convolution)
        wanted = layer(y, (20, 20))
        with torch.autocast("cpu", dtype=dtype), torch.set_grad_enabled(training):
            got = layer(y, (20, 20))
        assert got.dtype == torch.float32
        assert_close(got - y, wanted - y, 2e-2)


@pytest.mark.slow
def test_block_compiles_as_one_graph_with_gradients():
    layer = block()
    compiled = torch.compile(layer, fullgraph=True)
    y, rotations = torch.randn(2, 12, 32), rotary_table((3, 4), 32)
    got, wanted = compiled(y, (3, 4), rotations), layer(y, (3, 4), rotations)
    assert_close(got, wanted, 1e-5)
    gradients = (torch.autograd.grad(x.square().sum(), layer.parameters()) for x in (got, wanted))
    for a, b in zip(*gradients, strict=True):
        assert_close(a, b, 1e-4)


def test_low_precision_weights():
    layer = shaken(block()).bfloat16()
    y = torch.randn(1, 12, 32, dtype=torch.bfloat16)
    got = layer(y, (3, 4))
    assert got.dtype == torch.bfloat16
    assert_close(got, layer.double()(y.double(), (3, 4)), 2e-2)


@pytest.mark.parametrize("part", ["cpe", "ttt", "mlp"])
def test_low_precision_of_each_part(part):
    """In the sum of all three the rounding of one hides the others."""
    module, grid = block().get_submodule(part), (5, 7)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if part == "ttt":
        module.w3.data.mul_(4)  # its head adds as much as the others
    x = torch.randn(1, 35, 32)
    wanted = module(x, grid)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(module(x, grid), wanted, 2e-2)
    got = module.bfloat16()(x.bfloat16(), grid)
    assert_close(got, module.double()(x.bfloat16().double(), grid), 2e-2)
