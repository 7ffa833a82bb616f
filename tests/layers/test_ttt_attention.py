"""TTTAttention: against tensors of the released code, on any grid, with tokens outside of it."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from timm.layers import apply_rot_embed_cat

from tolerances import FORWARD, assert_close
from vision_ttt.layers import TTTAttention
from vision_ttt.layers.attention_inner import INNER_MODELS
from vision_ttt.ops import swiglu_ttt, ttt_linear
from vision_ttt.ops.vit3_ttt import depthwise, depthwise_step, gated_unit, gated_unit_step

GOLDEN = Path(__file__).parents[1] / "golden"
every_inner = pytest.mark.parametrize("inner", INNER_MODELS)


def ours(name):
    """The name of a released parameter here."""
    name = name.replace("_conv2d", "_conv")
    return name if name.startswith(("qkv", "proj")) else f"inner.{name}"


def test_released_layer():
    tensors = load_file(GOLDEN / "t5_attention.safetensors")
    description = json.loads((GOLDEN / "t5_attention.json").read_text())
    config, tolerance = description["config"], description["tolerance"]
    layer = TTTAttention(config["dim"], config["num_heads"])
    own = layer.state_dict()
    released = {ours(k[8:]): x for k, x in tensors.items() if k.startswith("weights.")}
    layer.load_state_dict({key: x.view_as(own[key]) for key, x in released.items()})
    x = tensors["input.x"].requires_grad_()
    y = layer(x, tuple(config["grid"]))
    assert_close(y, tensors["output.y"], tolerance["forward"], "y")
    with torch.no_grad():
        assert_close(layer(x, tuple(config["grid"])), y, 1e-6, "inference")
    (y * tensors["input.grad_y"]).sum().backward()
    gradients = {"x": x.grad} | {key: p.grad for key, p in layer.named_parameters()}
    wanted = {k[12:]: g for k, g in tensors.items() if k.startswith("output.grad.")}
    assert len(wanted) == len(gradients) == 12
    for key, gradient in wanted.items():
        got = gradients["x" if key == "x" else ours(key)]
        assert_close(got, gradient.view_as(got), tolerance["gradients"], key)


def problem(inner, extra=(), dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = TTTAttention(32, 2, inner, **options).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer, torch.randn(2, 6 + len(extra), 32, dtype=dtype, requires_grad=True)


@every_inner
@pytest.mark.parametrize("extra", [(), (0, 4)])
def test_layer_gradcheck(inner, extra):
    layer, x = problem(inner, extra)
    names, weights = zip(*layer.named_parameters(), strict=True)

    def call(x, *weights):
        given = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(layer, given, (x, (2, 3), extra))

    assert torch.autograd.gradcheck(call, (x, *weights), fast_mode=True)


@every_inner
def test_images_of_a_batch_learn_apart_and_tokens_outside_the_grid_take_part(inner):
    layer, x = problem(inner, (0,))
    y = layer(x, (2, 3), (0,))
    for image in range(2):
        assert_close(layer(x[image : image + 1], (2, 3), (0,))[0], y[image], 1e-10)
    (of_extra,) = torch.autograd.grad(y[:, 1:].square().sum(), x, retain_graph=True)
    assert (of_extra[:, 0] != 0).any()  # image tokens learn from it
    (of_image,) = torch.autograd.grad(y[:, 0].square().sum(), x)
    assert (of_image[:, 1:] != 0).any()  # and it from them


@every_inner
def test_the_grid_matters(inner):
    layer, x = problem(inner)
    flat = layer(x, (1, 6))
    if inner == "ttt_linear":  # a sequence
        assert torch.equal(layer(x, (2, 3)), flat)
    else:
        assert not torch.allclose(layer(x, (2, 3)), flat)


@pytest.mark.parametrize("half", [False, True])
def test_rotations_are_those_of_timm(half):
    layer, _ = problem("swiglu", rotate_half=half)
    x, table = torch.randn(2, 7, 2, 16), torch.randn(6, 32)
    got = layer._rotated(x, table, (0,))
    wanted = apply_rot_embed_cat(x[:, 1:].transpose(1, 2), table, half=half).transpose(1, 2)
    assert_close(got[:, 1:], wanted, 1e-6)
    assert torch.equal(got[:, 0], x[:, 0])


@every_inner
@pytest.mark.parametrize("training", [True, False])
def test_autocast(inner, training):
    layer, x = problem(inner, dtype=torch.float32)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # so that what is learnt is not below rounding
    wanted = layer(x, (2, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(training):
        assert_close(layer(x, (2, 3)), wanted, 1.2e-2 if inner == "ttt_linear" else 4e-2)


@every_inner
def test_gradients_of_norms_are_float32_sums_under_autocast(inner):
    torch.manual_seed(0)
    norms = torch.nn.LayerNorm(16), torch.nn.LayerNorm(16), torch.nn.LayerNorm(32)
    parameters = [parameter for norm in norms for parameter in norm.parameters()]
    for parameter in parameters:
        torch.nn.init.normal_(parameter)
    given = dict(zip(("q_norm", "k_norm", "norm"), norms, strict=True))
    attention, x = TTTAttention(32, 2, inner, **given), torch.randn(1, 4096, 32)
    gradients = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = attention(x, (64, 64))
        gradients.append(torch.autograd.grad(out.float().square().sum(), parameters))
    for norm in range(3):  # a constant added to all keys does not change what swiglu learns
        wanted, got = (torch.cat(each[2 * norm : 2 * norm + 2]) for each in gradients)
        assert_close(got, wanted, 4e-2)


def residual_conv(conv, x, image):
    """x [B, N, C], of which the image's tokens are convolved on the grid 2 × 3."""
    grid = x[:, image].unflatten(1, (2, 3)).permute(0, 3, 1, 2)
    added = F.conv2d(grid, conv.weight, conv.bias, padding=1, groups=x.shape[-1])
    return x.index_add(1, torch.tensor(image), added.permute(0, 2, 3, 1).flatten(1, 2))


def swiglu(inner, x, q, k, v, image):
    k = k.flatten(2)
    k = (k - k.mean(1, keepdim=True)) / (k.var(1, keepdim=True, correction=0) + 1).sqrt()
    k = residual_conv(inner.k_conv, k, image).unflatten(-1, q.shape[2:])
    q = residual_conv(inner.q_conv, q.flatten(2), image).unflatten(-1, q.shape[2:])
    return swiglu_ttt(q, k, v, inner.w1, inner.w2, inner.w3)


def linear(inner, x, q, k, v, image):
    """The directions one after the other, the back one on the flipped sequence."""
    own, z = inner.learner, 0
    steps = 1 / torch.arange(1, 17, dtype=x.dtype)
    for index in range(2):
        heads, flipped = slice(2 * index, 2 * index + 2), [1] * index
        rates = (x @ inner.rate_proj.weight[heads].T + inner.rate_proj.bias[heads]).sigmoid()
        o = ttt_linear(
            *(view.flip(flipped) for view in (q, k, v)),
            rates.flip(flipped) / q.shape[-1],
            *(own.w0[heads], own.b0[heads], own.norm_weight[heads], own.norm_bias[heads]),
            position_scale=(steps + own.position_offset[index]).clamp(min=0),
            backend="reference",
        ).flatten(2)
        norm = inner.merge.weight[index], inner.merge.bias[index], 1e-6
        z = z + F.layer_norm(o, o.shape[-1:], *norm).flip(flipped)
    return z.unflatten(-1, q.shape[2:])


def vit3(inner, x, q, k, v, image):
    o = gated_unit(q, *gated_unit_step(k, v, inner.w1, inner.w2))
    q2, k2, v2 = inner.conv_qkv(x[:, image]).chunk(3, dim=-1)
    convolved = depthwise(q2, depthwise_step(k2, v2, inner.w3, (2, 3)), (2, 3))
    added = inner.conv_proj(convolved).unflatten(-1, q.shape[2:])
    return o.index_add(1, torch.tensor(image), added)


DESCRIPTIONS = {"swiglu": swiglu, "ttt_linear": linear, "vit3": vit3}


@every_inner
@pytest.mark.parametrize("extra", [(), (0, 4)])
def test_layer_is_its_description(inner, extra):
    """With norms, and heads of another width."""
    norms = {name: torch.nn.LayerNorm(8) for name in ("q_norm", "k_norm")}
    norms["norm"] = torch.nn.LayerNorm(16)
    layer, x = problem(inner, extra, head_dim=8, qkv_bias=False, **norms)
    assert layer.qkv.bias is None
    q, k, v = ((x @ w.T).unflatten(-1, (2, 8)) for w in layer.qkv.weight.split(16))
    image = [t for t in range(x.shape[1]) if t not in extra]
    o = DESCRIPTIONS[inner](layer.inner, x, layer.q_norm(q), layer.k_norm(k), v, image)
    assert_close(layer(x, (2, 3), extra), layer.proj(layer.norm(o.flatten(2))), 1e-11)


def test_keys_are_normalised_in_float32():
    """Their mean has more digits than a half precision has."""
    layer, _ = problem("swiglu")
    k = (30 + torch.randn(2, 6, 2, 16)).bfloat16()
    wanted = layer.inner.keys(k.double(), (2, 3), ())
    assert_close(layer.bfloat16().inner.keys(k, (2, 3), ()), wanted, FORWARD[torch.bfloat16])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((32, 3), "dim must be a multiple of num_heads, got 32 and 3"),
        ((32, 0), "dim must be a multiple of num_heads, got 32 and 0"),
        ((32, 2, "mlp"), "inner must be one of .*'swiglu'.*, got 'mlp'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TTTAttention(*arguments)


def test_tokens_that_do_not_fill_the_grid_are_refused():
    message = "6 tokens do not fill a grid of 2 × 3 and 1 extra tokens"
    with pytest.raises(ValueError, match=message):
        TTTAttention(32, 2)(torch.randn(1, 6, 32), (2, 3), (0,))
