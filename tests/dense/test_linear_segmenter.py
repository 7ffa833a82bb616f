"""Token maps of plain backbones, and the linear segmenter on them."""

import pytest
import torch
import torch.nn.functional as F

from tolerances import assert_close
from vision_ttt.dense import LinearSegmenter, TokenMap
from vision_ttt.dense.building import DenseModelError, build_detector, build_segmenter
from vision_ttt.dense.plain_encoder import as_encoder
from vision_ttt.models import create_model

TINY = {"img_size": 64, "patch_size": 8, "embed_dim": 48, "depth": 2}
BACKBONES = {
    "vittt_nano_patch4_32": {"num_heads": 3},
    "vit3_tiny_patch16_224": {"num_heads": 3},
    "vim_nano_patch4_32": {},
    "mambar_nano_patch4_32": {},
    "deit_tiny_patch16_224": {"num_heads": 3},
}


def segmenter(name="vittt_nano_patch4_32", **arguments):
    return build_segmenter(
        name,
        num_classes=5,
        dense={"maps": "tokens"},
        **{**TINY, **BACKBONES[name], **arguments},
    )


@pytest.mark.parametrize("name", BACKBONES)
def test_logits_are_a_linear_layer_on_the_classifiers_tokens(name):
    model = segmenter(name).eval()
    backbone = model.maps.backbone
    images = torch.randn(2, 3, 64, 96)  # other positions than the model's own
    tokens, _ = as_encoder(backbone).split_tokens(backbone.forward_features(images))
    logits = F.linear(tokens, model.head.weight[:, :, 0, 0], model.head.bias)
    small = logits.transpose(1, 2).unflatten(2, (8, 12))
    wanted = F.interpolate(small, size=(64, 96), mode="bilinear", align_corners=False)
    assert_close(model(images), wanted, 1e-5)


@pytest.mark.parametrize("name", BACKBONES)
def test_every_parameter_that_is_used_learns(name):
    model = segmenter(name)
    (logits,) = model(torch.randn(1, 3, 64, 64), auxiliary=True)
    F.cross_entropy(logits, torch.randint(5, (1, 64, 64))).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]


def test_sides_need_not_be_whole_patches():
    model = segmenter().eval()
    images = torch.randn(1, 3, 50, 70)
    found = model(images)
    assert found.shape == (1, 5, 50, 70)
    padded = model(F.pad(images, (0, 2, 0, 6)))
    assert_close(found, padded[..., :50, :70], 1e-6)


def test_nothing_is_added_to_the_backbone_but_the_layer():
    model = segmenter()
    own = {name.partition(".")[0] for name, _ in model.named_parameters()}
    assert own == {"maps", "head"}
    assert all(name.startswith("maps.backbone.") for name, _ in model.maps.named_parameters("maps"))
    assert model.maps.channels == (48,)
    assert model.maps.strides == (8,)


def test_what_a_segmenter_of_tokens_refuses():
    with pytest.raises(DenseModelError, match="'channels'; accepted: maps, tokens"):
        build_segmenter(
            "vim_nano_patch4_32", num_classes=5, dense={"maps": "tokens", "channels": 9}
        )
    with pytest.raises(DenseModelError, match="a detector accepts adapter, pyramid, stages"):
        build_detector("vim_nano_patch4_32", num_classes=5, dense={"maps": "tokens"})
    with pytest.raises(DenseModelError, match="model resnet18 cannot be built"):
        build_segmenter("resnet18", num_classes=5, dense={"maps": "tokens"})
    with pytest.raises(DenseModelError, match="num_classes is 1"):
        build_segmenter("vim_nano_patch4_32", num_classes=1, dense={"maps": "tokens"})
    with pytest.raises(ValueError, match="make it with dynamic_img_size=True"):
        TokenMap(create_model("vim_nano_patch4_32"))
    with pytest.raises(ValueError, match="patches overlap"):
        TokenMap(create_model("vim_nano_patch4_32", stride=2, dynamic_img_size=True))
    with pytest.raises(ValueError, match=r"\[B, 3, H, W\], got \[3, 64, 64\]"):
        segmenter()(torch.randn(3, 64, 64))


def test_images_have_the_backbones_channels():
    model = segmenter(in_chans=1).eval()
    assert model(torch.randn(1, 1, 64, 64)).shape == (1, 5, 64, 64)
    for shape in ((1, 3, 64, 64), (1, 1, 0, 64)):
        with pytest.raises(ValueError, match=r"images must be \[B, 1, H, W\], got "):
            model(torch.randn(shape))


def test_maps_by_name():
    maps = TokenMap("vim_nano_patch4_32")
    assert LinearSegmenter(maps, 3)(torch.randn(1, 3, 32, 32)).shape == (1, 3, 32, 32)
