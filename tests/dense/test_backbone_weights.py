"""Classifiers' weights in the backbone of a dense model."""

import pytest
import timm
import torch

from tolerances import assert_close
from vision_ttt.dense import ViTAdapter, load_backbone
from vision_ttt.models import create_model

SMALL = {"embed_dim": 48, "depth": 4, "num_heads": 3, "patch_size": 8}
NAMES = ("vittt_nano_patch4_32", "vit3_tiny_patch16_224", "deit_tiny_patch16_224")


def classifier(name, img_size=32, **arguments):
    return timm.create_model(
        name, img_size=img_size, num_classes=7, dynamic_img_size=True, **{**SMALL, **arguments}
    ).eval()


def backbone(name, img_size=32):
    torch.manual_seed(1)
    return ViTAdapter(classifier(name, img_size), conv_width=8).backbone.eval()


@pytest.mark.parametrize("img_size", [32, 64])
@pytest.mark.parametrize("name", NAMES)
def test_weights_of_a_classifier(name, img_size):
    torch.manual_seed(0)
    source, target = classifier(name, img_size), backbone(name)
    done = load_backbone(target, source.state_dict(), "the source")
    assert set(done.left_out) == {"norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert set(done.taken) == set(target.state_dict())
    assert done.kept == ()
    interpolated = ("pos_embed",) if img_size == 64 and "vit3" not in name else ()
    assert done.interpolated == interpolated
    own, weights = target.state_dict(), source.state_dict()
    assert all(torch.equal(own[key], weights[key]) for key in own if key not in interpolated)
    pretrained = {f"backbone.{key}": value for key, value in weights.items()}
    if "deit" not in name:
        assert load_backbone(target, pretrained, "a pre-training").interpolated == interpolated
    if not interpolated:
        images = torch.randn(1, 3, 32, 32)
        with torch.no_grad():
            wanted = source.forward_intermediates(images, [3], intermediates_only=True)
            got = target.forward_intermediates(images, [3], intermediates_only=True)
        assert_close(got[0], wanted[0], 1e-6)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("vim_tiny_patch16_224", ("head.weight", "head.bias")),
        (
            "mambar_small_patch16_224",
            ("head.weight", "head.bias", "neck.reduce.weight", "neck.norm.weight"),
        ),
    ],
)
def test_weights_with_class_tokens_or_registers(name, left_out):
    def made(img_size):
        sizes = {"embed_dim": 48, "depth": 4, "patch_size": 8, "img_size": img_size}
        return create_model(name, num_classes=7, dynamic_img_size=True, **sizes).eval()

    source, target = made(64), ViTAdapter(made(32), conv_width=8).backbone.eval()
    done = load_backbone(target, source.state_dict(), "the source")
    assert set(done.left_out) == {"norm.weight", *left_out}
    assert set(done.taken) == set(target.state_dict())
    assert done.interpolated == ("pos_embed",)
    images = torch.randn(1, 3, 64, 64)
    source.set_input_size(32)
    with torch.no_grad():
        wanted = source.forward_intermediates(images, [3], intermediates_only=True)
        got = target.forward_intermediates(images, [3], intermediates_only=True)
    assert_close(got[0], wanted[0], 1e-6)


def test_interpolated_positions_keep_their_content():
    name = "vittt_nano_patch4_32"
    source, target = classifier(name, 64).state_dict(), backbone(name)
    rows = torch.arange(8.0)[:, None].expand(8, 8).reshape(1, 64, 1)
    source["pos_embed"] = rows.expand(1, 64, 48)
    load_backbone(target, source, "the source")
    found = target.pos_embed.detach().reshape(4, 4, 48)
    assert_close(found[1:3], torch.tensor([2.5, 4.5])[:, None, None].expand(2, 4, 48), 0.05)


def test_what_does_not_fit_is_named_and_nothing_is_loaded():
    target = backbone(NAMES[0])
    before = {key: x.clone() for key, x in target.state_dict().items()}
    weights = classifier(NAMES[0]).state_dict()
    del weights["blocks.3.norm.bias"]
    weights["blocks.0.norm.weight"] = torch.ones(5)
    weights["blocks.4.norm.weight"] = torch.ones(48)
    with pytest.raises(ValueError, match=r"file\.safetensors does not fit the backbone Vittt") as e:
        load_backbone(target, weights, "file.safetensors")
    said = str(e.value)
    assert "missing blocks.3.norm.bias;" in said
    assert "unexpected blocks.4.norm.weight;" in said
    assert said.endswith("of another shape blocks.0.norm.weight [5] for [48]")
    assert all(torch.equal(x, before[key]) for key, x in target.state_dict().items())

    done = load_backbone(target, weights, "file.safetensors", allow_unmatched=True)
    assert done.kept == ("blocks.0.norm.weight", "blocks.3.norm.bias")
    assert {"blocks.0.norm.weight", "blocks.4.norm.weight", "head.bias"} <= set(done.left_out)
    assert torch.equal(target.patch_embed.proj.weight, weights["patch_embed.proj.weight"])
    assert torch.equal(target.blocks[0].norm.weight, before["blocks.0.norm.weight"])


def test_another_model_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        load_backbone(backbone(NAMES[0]), classifier(NAMES[1]).state_dict(), "vit3")
    with pytest.raises(ValueError, match=r"deit does not fit.* 17 tokens"):
        load_backbone(backbone(NAMES[0]), classifier(NAMES[2]).state_dict(), "deit")
    oblong, target = classifier(NAMES[0], (32, 64)).state_dict(), backbone(NAMES[0])
    with pytest.raises(ValueError, match=r"oblong does not fit.* square"):
        load_backbone(target, oblong, "oblong")
    done = load_backbone(target, oblong, "oblong", allow_unmatched=True)
    assert done.kept == ("pos_embed",)


def test_an_adapter_at_another_size_gives_what_the_weights_say():
    torch.manual_seed(0)
    model = ViTAdapter(create_model("vittt_nano_patch4_32", dynamic_img_size=True), conv_width=8)
    source = create_model("vittt_nano_patch4_32", dynamic_img_size=True)
    load_backbone(model.backbone, source.state_dict(), "the source")
    images = torch.randn(1, 3, 64, 96)
    seen = []
    model.backbone.blocks[-1].register_forward_hook(lambda _b, _i, out: seen.append(out))
    with torch.no_grad():
        model.eval()(images)
        wanted = source.eval().forward_intermediates(
            images, [3], intermediates_only=True, output_fmt="NLC"
        )
    assert_close(seen[0], wanted[0], 1e-6)
