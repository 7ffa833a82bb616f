"""ViTs of timm made linear: the released model, what is inherited, other sizes, refusals."""

import json
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from timm.layers import GluMlp, LayerScale
from timm.models.deit import deit_tiny_patch16_224
from timm.models.vision_transformer import Block, VisionTransformer
from torch.utils.flop_counter import FlopCounterMode

import vision_ttt
from tolerances import assert_close
from vision_ttt.acceleration.packed_linear import PackedLinear
from vision_ttt.acceleration.packed_linear_vit import PackedLinearBlock
from vision_ttt.layers.attention_inner import INNER_MODELS
from vision_ttt.models import LinearViT, linearize
from vision_ttt.models.linear_vit import LinearBlock

GOLDEN = Path(__file__).parents[1] / "golden"
SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
VITS = {
    "deit_tiny_patch16_224": {"img_size": 64},
    "deit3_small_patch16_224": {"img_size": 64},  # layer scale, no position of the class token
    "vit_base_patch16_clip_224": {"img_size": 64},  # a norm before the blocks
    "vit_small_patch14_reg4_dinov2": {"img_size": 56},  # registers
    "vit_medium_patch16_gap_240": {"img_size": 64},  # no class token
    "eva02_tiny_patch14_224": {"img_size": 56, "embed_dim": 48},  # separate biases, rotations
    "vit_small_patch16_rope_224": {"img_size": 64},  # rotations alone
    "vit_small_patch16_dinov3_qkvb": {"img_size": 64},  # scales that are no layers, half rotations
}
"""Kinds of plain ViTs, each with parts of its own, and their arguments."""
every_kind = pytest.mark.parametrize("name", VITS)


def vit(name="deit_tiny_patch16_224", **given):
    """A small ViT with random weights everywhere."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL, **VITS[name], **given}).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def images(model, side=None):
    return torch.randn(2, 3, *([side, side] if side else model.patch_embed.img_size))


class Softmax(torch.nn.Module):
    """The attention of before in the place of the inner model."""

    def forward(self, x, q, k, v, grid, extra):
        q, k, v = (view.transpose(1, 2) for view in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def with_softmax(linear):
    for block in linear.blocks:
        block.attn.inner = Softmax()
    return linear


def test_released_model():
    tensors = load_file(GOLDEN / "t5_model.safetensors")
    description = json.loads((GOLDEN / "t5_model.json").read_text())
    config, tolerance = description["config"], description["tolerance"]
    side = config.pop("img_size")
    model = linearize(VisionTransformer(img_size=side, class_token=False, global_pool="avg",
                                        fc_norm=False, **config))  # fmt: skip

    def ours(name):
        new = name.replace("_conv2d", "_conv").replace("attn.", "attn.inner.")
        return new if new in own else name

    own = model.state_dict()
    released = {ours(k[8:]): x for k, x in tensors.items() if k.startswith("weights.")}
    model.load_state_dict({key: x.view_as(own[key]) for key, x in released.items()})
    x = tensors["input.x"].requires_grad_()
    y = model(x)
    assert_close(y, tensors["output.y"], tolerance["forward"], "y")
    (y * tensors["input.grad_y"]).sum().backward()
    gradients = {"x": x.grad} | {key: p.grad for key, p in model.named_parameters()}
    wanted = {k[12:]: g for k, g in tensors.items() if k.startswith("output.grad.")}
    assert len(wanted) == len(gradients) > 40
    for key, gradient in wanted.items():
        got = gradients[key if key == "x" else ours(key)]
        assert_close(got, gradient.view_as(got), tolerance["gradients"], key)


@every_kind
def test_all_but_the_inner_model_is_the_vit_s(name):
    """With softmax attention in its place the linear model is the ViT."""
    model = vit(name).double()
    has_token = model.cls_token is not None
    linear = linearize(model, class_token="keep" if has_token else "drop")
    x = images(model).double()
    with torch.no_grad():
        assert_close(with_softmax(linear)(x), model(x), 1e-9, "logits")
        assert_close(linear.forward_features(x), model.forward_features(x), 1e-9, "tokens")
    assert not linear.training
    assert linear.inheritance.without_place == ()


@every_kind
def test_without_a_class_token_tokens_are_averaged(name):
    model = vit(name)
    linear = linearize(model)
    left = () if model.cls_token is None else ("cls_token",)
    assert linear.inheritance.without_place == left
    tokens = linear.forward_features(images(model))
    registers = 4 if "reg4" in name or "dinov3" in name else 0
    assert tokens.shape[1] == model.patch_embed.num_patches + registers
    pooled = linear.fc_norm(tokens[:, registers:].mean(1))
    assert_close(linear.head(pooled), linear.forward_head(tokens), 1e-5)


@every_kind
def test_a_vit_s_positions_serve_images_of_any_size(name):
    linear = linearize(vit(name))
    patch = linear.patch_embed.patch_size[0]
    assert linear(torch.randn(1, 3, 6 * patch, 3 * patch)).shape == (1, 5)
    with pytest.raises(ValueError, match="are not whole patches"):
        linear(torch.randn(1, 3, 6 * patch + 1, 3 * patch))


@every_kind
@pytest.mark.parametrize("class_token", ["drop", "keep"])
def test_a_saved_model_is_built_again_without_the_vit(name, class_token, tmp_path):
    model = vit(name)
    if class_token == "keep" and model.cls_token is None:
        with pytest.raises(ValueError, match="'keep', and the ViT has none; accepted: 'drop'"):
            linearize(model, class_token=class_token)
        return
    linear = linearize(model, class_token=class_token)
    save_file(linear.state_dict(), tmp_path / "linear.safetensors")
    arguments = json.loads(json.dumps(linear.arguments))
    again = timm.create_model("linear_vit", **arguments).eval()
    again.load_state_dict(load_file(tmp_path / "linear.safetensors"))
    x = images(model)
    assert torch.equal(again(x), linear(x))
    for key in ("mean", "std", "input_size"):
        assert again.pretrained_cfg[key] == linear.pretrained_cfg[key]


@every_kind
@pytest.mark.parametrize("pool", [{}, {"global_pool": "avg"}], ids=str)
def test_arguments_and_timms_folder_describe_the_model_as_it_is(name, pool, tmp_path):
    model = vit(name, drop_path_rate=0.1, **pool)
    model.pretrained_cfg = {**model.pretrained_cfg, "tag": "of_a_folder"}
    linear = linearize(model)
    assert linear.arguments["drop_path_rate"] == 0.1
    linear.reset_classifier(7)
    side = 3 * linear.patch_embed.patch_size[0]
    linear.set_input_size(side)
    again = timm.create_model("linear_vit", **json.loads(json.dumps(linear.arguments))).eval()
    again.load_state_dict(linear.state_dict())
    timm.models.save_for_hf(again, tmp_path)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(2, linear.in_chans, side, side)
    assert linear(x).shape == (2, 7)
    for each in (again, loaded):
        assert torch.equal(each(x), linear(x))


@pytest.mark.parametrize("inner", INNER_MODELS)
def test_inner_models_are_new_and_the_vit_is_unchanged(inner):
    model = vit()
    before = {key: x.clone() for key, x in model.state_dict().items()}
    linear = linearize(model.train(), inner)
    assert linear.training
    inherited, new, left = linear.inheritance
    assert set(new) == {key for key in linear.state_dict() if ".attn.inner." in key}
    assert linear.new_parameters() <= set(new)
    assert set(inherited) | set(new) == set(linear.state_dict())
    wanted = f"{len(inherited)} tensors inherited, {len(new)} new, 1 without a place (cls_token)"
    assert left == ("cls_token",)
    assert str(linear.inheritance) == wanted
    linear(images(model)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in linear.parameters())
    for key, x in model.state_dict().items():
        assert torch.equal(x, before[key])
    assert model.head.weight.grad is None


def test_gradients_of_norms_are_float32_sums_under_autocast():
    """Without positions the first block's tokens are a convolution's, in bfloat16."""
    torch.manual_seed(0)
    block = LinearBlock(Block(32, 2), "swiglu")
    norms = [*block.norm1.parameters(), *block.norm2.parameters()]
    x, gradients = torch.randn(1, 4096, 32).bfloat16(), []
    for tokens, enabled in ((x.float(), False), (x, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = block(tokens, (64, 64))
        gradients.append(torch.autograd.grad(out.float().square().sum(), norms))
    for wanted, got in zip(*gradients, strict=True):
        assert_close(got, wanted, 2e-2)


def test_weights_without_decay():
    linear = linearize(vit("vit_small_patch14_reg4_dinov2"))
    inner = {f"blocks.{i}.attn.inner.w{j}" for i in (0, 1) for j in (1, 2, 3)}
    assert linear.no_weight_decay() == {"pos_embed", "class_tokens.tokens", *inner}


@pytest.mark.parametrize(
    ("name", "inner", "is_one_op"),
    [
        *((name, "swiglu", not name.startswith("eva02")) for name in VITS),  # whose MLPs are gated
        *(("deit_tiny_patch16_224", inner, False) for inner in ("vit3", "ttt_linear")),
    ],
)
def test_for_inference(name, inner, is_one_op):
    """Blocks become an op each, or have their linear layers packed, without a warning."""
    model = vit(name)
    linear = linearize(model, inner, "drop" if model.cls_token is None else "keep")
    x = images(model)
    with torch.no_grad():
        fast = vision_ttt.for_inference(linear, strict=True)
        assert_close(fast(x), linear(x), 1e-4)
        counts = []
        for each in (linear, fast):
            with FlopCounterMode(display=False) as counter:
                each(x)
            counts.append(counter.get_total_flops())
    assert counts[1] == pytest.approx(counts[0], rel=0.02)
    assert isinstance(fast.blocks[0], PackedLinearBlock) == is_one_op
    if not is_one_op:
        assert isinstance(fast.blocks[0].mlp.fc1, PackedLinear)


def _hooked(block):
    block.attn.proj.register_forward_hook(lambda *_: None)


def _one_scale(block):
    block.ls1 = LayerScale(32)


def _own_drop(block):
    block.mlp.drop1 = type("Own", (torch.nn.Dropout,), {})().eval()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_hooked, "attn.proj has a hook"),
        (_one_scale, "one of ls1 and ls2 is a LayerScale, the other is none"),
        (_own_drop, "mlp.drop1 is a Own"),
    ],
)
def test_for_inference_names_a_changed_block_and_keeps_it(change, reason):
    linear = linearize(vit())
    change(linear.blocks[0])
    x = images(linear)
    with pytest.raises(ValueError, match=rf"blocks\.0 \({reason}"):
        vision_ttt.for_inference(linear, strict=True)
    with pytest.warns(RuntimeWarning, match=reason):
        fast = vision_ttt.for_inference(linear)
    with torch.no_grad():
        assert_close(fast(x), linear(x), 1e-4)
    is_one_op = [isinstance(block, PackedLinearBlock) for block in fast.blocks]
    assert is_one_op == [False, True]
    assert isinstance(fast.blocks[0].mlp.fc1, torch.nn.Linear)


@pytest.mark.parametrize(
    "arguments",
    [
        {"qk_norm": True},
        {"act_layer": torch.nn.SiLU},
        {"mlp_layer": GluMlp},
        {"num_heads": 4},  # of eight channels each
    ],
)
def test_for_inference_packs_the_layers_of_another_design(arguments):
    linear = linearize(vit("vit_medium_patch16_gap_240", **arguments))
    x = images(linear)
    with torch.no_grad():
        for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
            fast = vision_ttt.for_inference(linear, dtype=dtype, strict=True)
            assert_close(fast(x), linear(x), tolerance)
            assert isinstance(fast.blocks[0].mlp.fc1, PackedLinear)
            assert fast.norm.weight.dtype == torch.float32


def test_maps_of_features():
    model = timm.create_model(
        "linear_vit", base="deit_tiny_patch16_224", features_only=True, **SMALL, out_indices=[0, 1]
    )
    assert [x.shape for x in model(torch.randn(1, 3, 32, 48))] == [(1, 32, 2, 3)] * 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("resnet10t", "neither timm's VisionTransformer nor its Eva"),
        ("deit_tiny_distilled_patch16_224", "neither timm's VisionTransformer nor its Eva"),
        ("vit_base_patch16_siglip_224", "it pools by 'map'"),
        ("vit_small_patch16_18x2_224", "blocks.0 is a ParallelThingsBlock"),
        ("vit_small_patch16_rope_mixed_224", "its positions are RotaryEmbeddingMixeds"),
        ("vit_tiny_r_s16_p8_224", "its patches are made by HybridEmbed"),
    ],
)
def test_another_architecture_is_refused_with_the_reason(name, reason):
    given = {} if name.startswith("resnet") else {"depth": 1, "embed_dim": 32, "num_heads": 2}
    with pytest.raises(ValueError, match=rf"cannot be linearised: .*{reason}.*\. Plain ViTs"):
        linearize(timm.create_model(name, **given))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"model": "deit"}, TypeError, "model must be one of timm's ViTs, got str"),
        ({"inner": "mlp"}, ValueError, "inner must be one of .*'ttt_linear'.*, got 'mlp'"),
        ({"class_token": "both"}, ValueError, "class_token must be one of .*'keep'.*, got 'both'"),
    ],
)
def test_wrong_arguments_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        linearize(**{"model": vit(), **given})


@pytest.mark.parametrize("base", ["local-dir:/tmp", "hf-hub:a/b", "nothing", 3, "linear_vit"])
def test_a_base_that_is_no_name_of_timm_s_is_refused(base):
    with pytest.raises(ValueError, match=r"base must be .*one of timm's ViTs"):
        timm.create_model("linear_vit", base=base)


@pytest.mark.parametrize("name", ["qkv", "proj"])
def test_a_projection_with_an_adapter_is_refused(name):
    class Adapter(torch.nn.Sequential):
        pass

    model = vit()
    attention = model.blocks[1].attn
    setattr(attention, name, Adapter(getattr(attention, name)))
    with pytest.raises(ValueError, match=rf"blocks\.1\.attn\.{name} is a Adapter, and a Linear is"):
        linearize(model)


def test_of_a_frozen_vit_every_parameter_is_trainable():
    frozen = vit().requires_grad_(False)
    assert all(parameter.requires_grad for parameter in linearize(frozen).parameters())
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


def test_a_linear_model_is_not_linearised_again():
    with pytest.raises(ValueError, match="LinearViT cannot be linearised"):
        linearize(linearize(vit()))


@pytest.mark.parametrize("build", [VisionTransformer, deit_tiny_patch16_224])
def test_a_vit_that_timms_factory_has_not_built_has_no_arguments(build):
    linear = linearize(build(img_size=32, patch_size=16, **SMALL))
    assert isinstance(linear, LinearViT)
    linear.set_input_size(64)
    assert linear.arguments is None


def test_a_fresh_one_has_the_scales_of_its_base():
    base = "vit_small_patch16_dinov3"
    model = timm.create_model("linear_vit", base=base, init_values=0.5, **SMALL)
    assert torch.equal(model.blocks[1].ls2.gamma, torch.full((32,), 0.5))
