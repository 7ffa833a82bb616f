"""Maps of hierarchical backbones: strides, norms, weights of classifiers and of releases."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn

from dense_maps import nano_h_vit3
from tolerances import assert_close
from vision_ttt import convert
from vision_ttt.dense.stage_maps import StageMaps
from vision_ttt.models.h_vit3 import HViT3

GOLDEN = Path(__file__).parents[1] / "golden" / "h_vit3_model"


@pytest.mark.parametrize("size", [(64, 96), (70, 33), (1, 5)])
def test_a_map_per_stride_with_sides_rounded_up(size):
    maps = StageMaps(nano_h_vit3()).eval()
    found = maps(torch.randn(2, 3, *size))
    assert [x.shape[1] for x in found] == list(maps.channels) == [8, 16, 16, 24]
    for x, stride in zip(found, maps.strides, strict=True):
        assert tuple(x.shape[2:]) == tuple(-(-side // stride) for side in size)


def test_each_map_of_h_vit3_has_a_layer_norm_of_its_own():
    maps = StageMaps(nano_h_vit3()).eval()
    images = torch.randn(2, 3, 64, 64)
    bare = StageMaps(maps.backbone, norms=False).eval()
    for norm in maps.norms:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    for x, y, norm in zip(maps(images), bare(images), maps.norms, strict=True):
        wanted = nn.functional.layer_norm(
            y.permute(0, 2, 3, 1), (y.shape[1],), norm.weight, norm.bias, 1e-5
        )
        assert_close(x, wanted.permute(0, 3, 1, 2), 1e-5)
    assert sum(p.numel() for p in maps.norms.parameters()) == 2 * (8 + 16 + 16 + 24)


def test_resnet_has_no_more_parameters_than_its_stages():
    maps = StageMaps("resnet18")
    assert maps.channels == (64, 128, 256, 512)
    assert not list(maps.norms.parameters())
    whole = timm.create_model("resnet18", features_only=True, out_indices=(1, 2, 3, 4))
    whole.load_state_dict(maps.backbone.state_dict())
    images = torch.randn(1, 3, 65, 70)
    for x, y in zip(maps.eval()(images), whole.eval()(images), strict=True):
        assert torch.equal(x, y)


def test_every_parameter_learns():
    maps = StageMaps(nano_h_vit3())
    sum(x.square().mean() for x in maps(torch.randn(2, 3, 64, 64))).backward()
    assert not [name for name, p in maps.named_parameters() if p.grad is None]


def test_weights_of_a_classifier_have_the_backbones_names():
    classifier = nano_h_vit3(num_classes=7)
    maps = StageMaps(nano_h_vit3()).eval()
    weights = {
        name: x
        for name, x in classifier.state_dict().items()
        if name.partition(".")[0] not in ("norm", "head")
    }
    maps.backbone.load_state_dict(weights, strict=True)
    images = torch.randn(1, 3, 64, 64)
    wanted = classifier.eval().forward_intermediates(images, intermediates_only=True)
    for x, y, norm in zip(maps(images), wanted, maps.norms, strict=True):
        assert torch.equal(x, norm(y))


def test_checkpointing_changes_no_gradient():
    maps = StageMaps(nano_h_vit3())
    images = torch.randn(2, 3, 64, 64)
    gradients = []
    for enable in (False, True):
        maps.set_grad_checkpointing(enable)
        assert all(stage.grad_checkpointing is enable for stage in maps.backbone.stages)
        maps.zero_grad()
        sum(x.square().mean() for x in maps(images)).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in maps.parameters()]))
    assert torch.equal(*gradients)


def test_backbones_without_the_maps_are_refused():
    with pytest.raises(ValueError, match="no maps of stride 4, 8, 32, its strides are 16; a plain"):
        StageMaps("vit3_tiny_patch16_224")
    with pytest.raises(ValueError, match="Linear gives no maps"):
        StageMaps(nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="hvit3_huge"):
        StageMaps("hvit3_huge")


def released_detector():
    """The authors' backbone as their detectors hold it, and what its stages compute."""
    tensors = load_file(GOLDEN.with_suffix(".safetensors"))
    arguments = json.loads(GOLDEN.with_suffix(".json").read_text())["config"]["kwargs"]
    arguments["dims"] = arguments.pop("dim")
    released = {
        f"backbone.{key[8:]}": x
        for key, x in tensors.items()
        if key.startswith("weights.") and not key[8:].startswith(("norm.", "head."))
    }
    for index, dim in enumerate(arguments["dims"]):
        released[f"backbone.norm{index}.weight"] = torch.rand(dim)
        released[f"backbone.norm{index}.bias"] = torch.rand(dim)
    released["neck.lateral_convs.0.conv.weight"] = torch.rand(4, arguments["dims"][0], 1, 1)
    released["roi_head.bbox_head.fc_cls.bias"] = torch.rand(81)
    return released, arguments, tensors


def test_the_backbone_of_a_released_detector_loads_strictly(tmp_path):
    released, arguments, tensors = released_detector()
    torch.save({"meta": {"epoch": 12}, "state_dict": released}, tmp_path / "released.pth")
    maps = StageMaps(HViT3(**{**arguments, "num_classes": 0})).eval()
    converted = convert.remap(convert.read_release(tmp_path / "released.pth"), maps)
    maps.load_state_dict(converted, strict=True)
    last = maps(tensors["input.image"])[3].flatten(2).transpose(1, 2)
    weight, bias = (released[f"backbone.norm3.{name}"] for name in ("weight", "bias"))
    stage = tensors["output.stage3"]
    wanted = nn.functional.layer_norm(stage, stage.shape[-1:], weight, bias, 1e-5)
    assert_close(last, wanted, 2e-5)


def test_what_does_not_belong_to_a_released_detector_is_named():
    released, arguments, _ = released_detector()
    maps = StageMaps(HViT3(**{**arguments, "num_classes": 0}))
    lost = released.pop("backbone.norm2.bias")
    with pytest.raises(convert.ConversionError, match=r"missing backbone\.norm2\.bias; unexpected"):
        convert.remap(released, maps)
    released |= {"backbone.norm2.bias": lost, "backbone.norm4.bias": lost}
    with pytest.raises(convert.ConversionError, match=r"unexpected backbone\.norm4\.bias"):
        convert.remap(released, maps)
    with pytest.raises(convert.ConversionError, match="weights of H-ViT³ with a norm per map, and"):
        convert.remap(released, HViT3(**arguments))
