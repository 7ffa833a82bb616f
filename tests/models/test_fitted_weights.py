"""Weights of segmenters as a classifier's; positions are tested with the models that have them."""

import pytest
import timm
import torch

from tolerances import assert_close
from vision_ttt.dense import build_segmenter
from vision_ttt.dense.backbone_weights import load_backbone
from vision_ttt.models.fitted_weights import checkpoint_filter_fn, classifier_weights

SMALL = {"embed_dim": 32, "depth": 1, "patch_size": 8, "img_size": 32}
HEADS = {"vittt_nano_patch8_256": {"num_heads": 1}, "vit3_nano_patch8_256": {"num_heads": 1}}


def segmenter(name, **options):
    return build_segmenter(name, num_classes=5, dense={"maps": "tokens"}, **SMALL, **options).eval()


def classifier(name, **options):
    return timm.create_model(name, num_classes=5, **{**SMALL, **options}).eval()


@pytest.mark.parametrize("name", HEADS)
def test_a_classifier_of_a_segmenters_weights_gives_its_logits(name):
    source, model = segmenter(name, **HEADS[name]), classifier(name, **HEADS[name])
    model.load_state_dict(checkpoint_filter_fn(source.state_dict(), model))
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        (tokens,) = source.maps(images)
        logits = source.head(tokens).flatten(2)
        assert_close(model(images), logits.mean(-1), 1e-5)
        model.reset_classifier(5, "")
        model.load_state_dict(checkpoint_filter_fn(source.state_dict(), model))
        assert_close(model(images), logits.mT, 1e-5)


@pytest.mark.parametrize("described_grid", [None, (3, 3)])
def test_positions_of_a_segmenter_are_interpolated(described_grid):
    """A described grid of another number of tokens is not that of the weights."""
    name = "vittt_nano_patch8_256"
    weights, model = (
        segmenter(name, num_heads=1).state_dict(),
        classifier(name, num_heads=1, img_size=64),
    )
    model.load_state_dict(checkpoint_filter_fn(weights, model, described_grid))
    assert model.pos_embed.shape == (1, 64, 32)


def test_positions_of_packaged_weights_are_interpolated_to_a_grid_of_as_many_tokens():
    name, size = "vittt_nano_patch4_32.digits", (16, 64)
    model = timm.create_model(name, pretrained=True, img_size=size)
    wanted = timm.create_model(name, pretrained=True)
    wanted.set_input_size(size)
    assert torch.equal(model.pos_embed, wanted.pos_embed)


@pytest.mark.parametrize("way", ["folder", "file", "state_dict"])
def test_positions_of_a_saved_model_that_is_not_square_stay(way, tmp_path):
    name, options = "vittt_nano_patch4_32.digits", {"img_size": (16, 64), "depth": 1}
    model = timm.create_model(name, **options)
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    if way == "folder":
        name, options = f"local-dir:{tmp_path}", {}
    else:
        given = {"file": str(tmp_path / "model.safetensors"), "state_dict": model.state_dict()}
        options["pretrained_cfg_overlay"] = {way: given[way]}
    loaded = timm.create_model(name, pretrained=True, **options)
    assert loaded.patch_embed.grid_size == (4, 16)
    assert torch.equal(loaded.pos_embed, model.pos_embed)


def test_positions_of_a_folder_are_interpolated_to_a_grid_of_as_many_tokens(tmp_path):
    model = timm.create_model("vittt_nano_patch4_32", img_size=(16, 64), depth=1)
    timm.models.save_for_hf(model, tmp_path)
    square = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=32)
    model.set_input_size(32)
    assert torch.equal(square.pos_embed, model.pos_embed)


def test_other_weights_stay_as_they_are():
    name = "vittt_nano_patch8_256"
    weights, model = segmenter(name, num_heads=1).state_dict(), classifier(name, num_heads=1)
    own = model.state_dict()
    assert classifier_weights(own, model) == own
    other_head = {**weights, "fuse.weight": torch.zeros(1)}
    assert classifier_weights(other_head, model) == other_head
    pooling_class_token = classifier("vim_nano_patch4_32")
    of_vim = segmenter("vim_nano_patch4_32").state_dict()
    assert classifier_weights(of_vim, pooling_class_token) == of_vim


def test_of_a_pre_training_the_backbone_is_taken():
    name = "vittt_nano_patch8_256"
    model = classifier(name, num_heads=1)
    own = {key: value for key, value in model.state_dict().items() if not key.startswith("head.")}
    saved = {f"backbone.{key}": value for key, value in own.items()}
    saved |= {"backbone.mask_token": torch.zeros(1), "decoder.weight": torch.zeros(1)}
    assert classifier_weights(saved, model).keys() == own.keys()
    dense = segmenter(name, num_heads=1).maps.backbone
    assert set(load_backbone(dense, saved, "w").taken) == set(own)
    with_others = {**saved, "fuse.weight": torch.zeros(1)}
    assert classifier_weights(with_others, model) == with_others
