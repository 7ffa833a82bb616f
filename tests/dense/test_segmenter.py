"""UperNet: transformers' results, every size of image, what BatchNorm needs."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import ResNetConfig, UperNetConfig, UperNetForSemanticSegmentation

import vision_ttt
from dense_maps import NANO_SEGMENTER, ConvMaps, nano_h_vit3
from tolerances import assert_close
from vision_ttt.dense.segmenter import Segmenter
from vision_ttt.dense.sizes import SegmenterSizes
from vision_ttt.dense.stage_maps import StageMaps

CLASSES = 5


def segmenter(maps: nn.Module | None = None) -> Segmenter:
    torch.manual_seed(0)
    maps = ConvMaps() if maps is None else maps
    return Segmenter(maps, CLASSES, SegmenterSizes(**NANO_SEGMENTER))


class _FeatureMaps(nn.Module):
    """A map module as transformers' models call their backbones."""

    def __init__(self, maps: nn.Module) -> None:
        super().__init__()
        self.maps = maps

    def forward_with_filtered_kwargs(self, images, **_):
        return SimpleNamespace(feature_maps=self.maps(images), hidden_states=None, attentions=None)


def transformers_model(own: Segmenter) -> UperNetForSemanticSegmentation:
    """transformers' UperNet on the same maps with the same weights."""
    channels = list(own.maps.channels)
    stages = ResNetConfig(
        embedding_size=8,
        hidden_sizes=channels,
        depths=[1] * 4,
        layer_type="basic",
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    model = UperNetForSemanticSegmentation(
        UperNetConfig(
            backbone_config=stages,
            num_labels=CLASSES,
            hidden_size=NANO_SEGMENTER["channels"],
            auxiliary_channels=NANO_SEGMENTER["auxiliary_channels"],
            auxiliary_in_channels=channels[2],
        )
    )
    model.backbone = _FeatureMaps(own.maps)
    model.decode_head.load_state_dict(own.head.state_dict())
    model.auxiliary_head.load_state_dict(own.auxiliary_head.state_dict())
    return model


def test_logits_and_loss_are_those_of_transformers():
    own = segmenter()
    theirs = transformers_model(own).train()
    images = torch.randn(2, 3, 70, 97)
    labels = torch.randint(CLASSES, (2, 70, 97))
    labels[:, :9] = 255
    logits, auxiliary = own(images, auxiliary=True)
    loss = F.cross_entropy(logits, labels, ignore_index=255)
    loss = loss + 0.4 * F.cross_entropy(auxiliary, labels, ignore_index=255)
    wanted = theirs(images, labels=labels)
    assert torch.equal(logits, wanted.logits)
    assert torch.equal(loss, wanted.loss)
    assert torch.equal(own.eval()(images), theirs.eval()(images).logits)


@pytest.mark.parametrize("size", [(64, 64), (33, 70), (1, 5)])
def test_logits_have_the_images_size(size):
    own = segmenter(StageMaps(nano_h_vit3()))
    images = torch.randn(2, 3, *size)
    for model in (own.train(), own.eval()):
        logits, auxiliary = model(images, auxiliary=True)
        assert logits.shape == auxiliary.shape == (2, CLASSES, *size)
        assert model(images).shape == (2, CLASSES, *size)


def test_every_parameter_learns():
    own = segmenter(StageMaps(nano_h_vit3()))
    images = torch.randn(2, 3, 64, 64)
    sum(logits.square().mean() for logits in own(images, auxiliary=True)).backward()
    assert not [name for name, p in own.named_parameters() if p.grad is None]


def test_the_auxiliary_head_does_not_change_the_logits():
    own = segmenter().eval()
    images = torch.randn(1, 3, 64, 64)
    logits, _ = own(images, auxiliary=True)
    own.auxiliary_head = None
    assert torch.equal(own(images), logits)


def test_classifiers_begin_with_small_weights():
    own = segmenter()
    for head in (own.head, own.auxiliary_head):
        assert 0.005 < head.classifier.weight.std() < 0.02
        assert not head.classifier.bias.any()


def test_classifiers_begin_as_large_as_asked_for():
    sizes = SegmenterSizes(**NANO_SEGMENTER, classifier_deviation=0.3)
    own = Segmenter(segmenter().maps, 40, sizes)
    for head in (own.head, own.auxiliary_head):
        assert 0.25 < head.classifier.weight.std() < 0.35


def test_logits_are_float32_under_autocast():
    own = segmenter().eval()
    images = torch.randn(1, 3, 64, 64)
    wanted = own(images)
    with torch.autocast("cpu", torch.bfloat16):
        got = own(images)
    assert got.dtype == torch.float32
    assert_close(got, wanted, 2e-2)


def test_arguments_that_do_not_fit_are_named():
    own = segmenter()
    with pytest.raises(ValueError, match="at least 2 images in a batch and process"):
        own(torch.randn(1, 3, 64, 64))
    own.maps.requires_grad_(False)
    own.eval()
    assert own(torch.randn(1, 3, 64, 64)).shape == (1, CLASSES, 64, 64)
    with pytest.raises(ValueError, match=r"images must be \[B, 3, H, W\], got \[3, 64, 64\]"):
        own(torch.randn(3, 64, 64))
    with pytest.raises(ValueError, match="num_classes is 1; accepted: 2 and above"):
        Segmenter(ConvMaps(), 1)


def test_for_inference_computes_the_same():
    own = segmenter(StageMaps(nano_h_vit3(dims=(32, 32, 64, 96)))).eval()
    images = torch.randn(1, 3, 65, 70)
    fast = vision_ttt.for_inference(own, strict=True)
    assert_close(fast(images), own(images), 1e-5)
    for got, wanted in zip(fast(images, auxiliary=True), own(images, auxiliary=True), strict=True):
        assert_close(got, wanted, 1e-5)
