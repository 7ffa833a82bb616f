"""Backbones of checkpoints with their images: crops as at test, or whole pictures."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from described_models import describe_classifier
from vision_ttt import explain
from vision_ttt.dense.vit_adapter import ViTAdapter
from vision_ttt.engine import ModelMetadata
from vision_ttt.engine.config import ConfigError
from vision_ttt.errors import UserError
from vision_ttt.models.registry import list_models
from vision_ttt.tasks.images.backbones import (
    ViewError,
    WholeImage,
    checkpoint_backbone,
    dense_backbone,
    named_backbone,
)
from vision_ttt.tasks.images.models import data_config
from vision_ttt.tasks.masked_images.model import build_masked_image_model

STATISTICS = {"mean": (0.5, 0.4, 0.3), "std": (0.25, 0.5, 0.2)}
NANO = {"num_classes": 2, "depth": 1, "embed_dim": 32, "num_heads": 1}


def picture(width, height):
    return Image.effect_noise((width, height), 60).convert("RGB")


@pytest.mark.parametrize(
    ("size", "shorter", "longer", "seen"),
    [
        ((640, 427), 32, None, (32, 48)),
        ((427, 640), 33, None, (48, 32)),
        ((100, 100), 3, None, (16, 16)),  # one patch at least
        ((400, 100), 64, 128, (32, 128)),
    ],
)
def test_whole_images_are_whole_patches(size, shorter, longer, seen):
    image = WholeImage(STATISTICS, shorter, 16, longer)(picture(*size))
    assert image.shape == (3, *seen)


def test_a_narrow_picture_is_refused_before_it_is_resized():
    told = "3 × 20000 pixels .* resized to 224 × 1493328; at most 33.6 million pixels"
    with pytest.raises(ViewError, match=told):
        WholeImage(STATISTICS, 224, 16)(picture(3, 20_000))


def test_whole_images_are_normalised_and_shown_again():
    backbone = named_backbone("vittt_nano_patch4_32", 8)
    own = picture(8, 12)
    image = backbone.prepare(own)
    levels = torch.tensor(np.array(own)).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(backbone.statistics[key]).view(3, 1, 1) for key in ("mean", "std"))
    assert torch.allclose(image, (levels - mean) / std, atol=1e-6)
    assert torch.allclose(backbone.shown(image), levels, atol=1e-6)


@pytest.mark.parametrize("name", ["vittt_nano_patch4_32", "vit_tiny_patch16_224"])
def test_a_classifier_sees_crops_or_whole_images_with_the_same_weights(name):
    torch.manual_seed(0)
    model = timm.create_model(name, **NANO, img_size=32)
    metadata = describe_classifier(name, {**NANO, "img_size": 32}, "ab", data_config(model, 32))
    cropped = checkpoint_backbone(model.eval(), metadata, shorter_side=None)
    assert cropped.model is cropped.around is model
    assert cropped.prepare(picture(90, 50)).shape == (3, 32, 32)
    whole = checkpoint_backbone(model, metadata, shorter_side=32)
    image = whole.prepare(picture(96, 64))[None]
    assert image.shape == (1, 3, 32, 48)
    assert not whole.model.training
    with torch.no_grad():
        assert whole.model(image).shape == (1, 2)
        square = image[..., :32]
        assert torch.allclose(whole.model(square), model(square), atol=1e-5)


def test_a_dense_models_backbone_is_looked_into_within_its_adapter():
    torch.manual_seed(0)
    backbone = timm.create_model(
        "vittt_tiny_patch16_224", **{**NANO, "num_classes": 0, "depth": 4}, dynamic_img_size=True
    )
    maps = ViTAdapter(backbone, conv_width=8, heads=2).eval()
    found = dense_backbone(maps, STATISTICS, shorter_side=None, at_test=(64, 96))
    assert found.model is backbone
    image = found.prepare(picture(300, 100))
    assert image.shape == (3, 32, 96)  # whole cells of stride 32: the adapter pads nothing
    magnitude = explain.gradient_magnitude(found.around, image[None])
    assert magnitude.shape == (1, 4, 2, 2, 6)
    larger = dense_backbone(maps, STATISTICS, shorter_side=64, at_test=(64, 96))
    assert larger.prepare(picture(300, 100)).shape == (3, 64, 192)


@pytest.mark.parametrize("shorter_side", [None, 48])
def test_the_backbone_of_pre_training_is_looked_into(shorter_side):
    torch.manual_seed(0)
    arguments = {**NANO, "num_classes": 0, "img_size": 32}
    model = build_masked_image_model("vittt_nano_patch4_32", arguments).eval()
    carried = {"input": data_config(model.backbone, 32)}
    metadata = ModelMetadata({"name": "masked-images"}, "vittt_nano_patch4_32", arguments, carried)
    found = checkpoint_backbone(model, metadata, shorter_side=shorter_side)
    image = found.prepare(picture(96, 48))[None]
    assert image.shape == (1, 3, *((32, 32) if shorter_side is None else (48, 96)))
    assert explain.gradient_magnitude(found.around, image).isfinite().all()


def test_what_has_no_image_backbone_is_refused():
    metadata = ModelMetadata({"name": "diffusion"}, "x", {}, {})
    with pytest.raises(UserError, match=r"a diffusion model .* it has no image backbone"):
        checkpoint_backbone(torch.nn.Identity(), metadata, shorter_side=None)
    denoiser = next(name for name in list_models() if not timm.is_model(name))
    with pytest.raises(ConfigError, match="is a denoising model, not a backbone of images"):
        named_backbone(denoiser, None)
    with pytest.raises(ConfigError, match="nearest: vittt_tiny_patch16_224"):
        named_backbone("vittt_tiny_patch16", None)
