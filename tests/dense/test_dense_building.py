"""Dense models by names and sizes: published counts, errors, and what the engine asks of them."""

import json

import pytest
import timm
import torch
from timm.models import group_parameters
from timm.optim import create_optimizer_v2
from torch import nn

from dense_maps import NANO_DETECTOR, NANO_H_VIT3, NANO_SEGMENTER, ConvMaps, nano_h_vit3, target
from detector_macs import count_detector_macs
from vision_ttt.bench import count_macs, count_parameters
from vision_ttt.dense.building import DenseModelError, build_detector, build_segmenter
from vision_ttt.dense.detector import Detector
from vision_ttt.dense.model import DenseModel
from vision_ttt.dense.segmenter import Segmenter
from vision_ttt.dense.sizes import DetectorSizes, SegmenterSizes
from vision_ttt.dense.stage_maps import StageMaps
from vision_ttt.engine.config import ConfigError
from vision_ttt.engine.freezing import freeze_layers, training_mode

STAGES = {"maps": "stages"}

PUBLISHED = {  # parameters in M and MACs in G, of the detector at 1280 × 800, segmenter 2048 × 512
    "hvit3_tiny": (48.4, 271, 57.9, 946),
    "hvit3_small": (74.0, 349, 83.6, 1026),
    "hvit3_base": (114, 510, 124, 1195),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_papers(name):
    detector_millions, _, segmenter_millions, _ = PUBLISHED[name]
    with torch.device("meta"):
        detector = build_detector(name, num_classes=80, dense=STAGES)
        segmenter = Segmenter(detector.maps, 150)
    digit = 0.5 if name == "hvit3_base" else 0.05  # half of the last one that is printed
    assert count_parameters(detector) / 1e6 == pytest.approx(detector_millions, abs=digit)
    # The published counts have no auxiliary head.
    count = count_parameters(segmenter) - count_parameters(segmenter.auxiliary_head)
    assert count / 1e6 == pytest.approx(segmenter_millions, abs=digit)


@pytest.mark.parametrize(
    "name",
    [
        "hvit3_tiny",
        pytest.param("hvit3_small", marks=pytest.mark.slow),
        pytest.param("hvit3_base", marks=pytest.mark.slow),
    ],
)
def test_macs_are_the_papers(name):
    _, detector_macs, _, segmenter_macs = PUBLISHED[name]
    with torch.device("meta"):
        detector = build_detector(name, num_classes=80, dense=STAGES)
        segmenter = Segmenter(detector.maps, 150)
    macs = count_detector_macs(detector, (800, 1280))
    assert macs / 1e9 == pytest.approx(detector_macs, rel=0.005)
    assert count_macs(segmenter, (3, 512, 2048)) / 1e9 == pytest.approx(segmenter_macs, rel=0.005)


def test_resnet_50_has_torchvisions_count():
    with torch.device("meta"):
        detector = build_detector("resnet50", num_classes=90, dense=STAGES)
    # torchvision publishes 44,401,393; its BatchNorm is frozen, ours has 53,120 learned parameters.
    assert count_parameters(detector) == 44_401_393 + 53_120


def test_every_key_has_its_effect():
    dense = {**STAGES, **NANO_DETECTOR, "stages": {"norms": False}, "anchor_ratios": [1.0]}
    dense |= {"score_threshold": 0.3, "nms_threshold": 0.6, "detections": 7, "box_resolution": 5}
    dense |= {"mask_resolution": 10}
    own = build_detector("hvit3_tiny", num_classes=4, dense=json.loads(json.dumps(dense)))
    assert own.maps.channels == (64, 128, 320, 512)
    assert not list(own.maps.norms.parameters())
    heads, proposals = own.heads, own.proposals
    assert own.pyramid.layer_blocks[0][0].out_channels == 16
    assert [size for (size,) in proposals.anchor_generator.sizes] == [8, 16, 32, 64, 128]
    assert proposals.anchor_generator.num_anchors_per_location() == [1] * 5
    assert (proposals._pre_nms_top_n, proposals._post_nms_top_n) == (
        {"training": 100, "testing": 50},
        {"training": 50, "testing": 50},
    )
    assert heads.box_head.fc6.weight.shape == (32, 16 * 25)
    assert heads.mask_roi_pool.output_size == (10, 10)
    assert heads.mask_roi_pool.map_levels.s0 == heads.box_roi_pool.map_levels.s0 == 56
    assert [block[0].out_channels for block in heads.mask_head] == [16, 16]
    assert heads.fg_bg_sampler.batch_size_per_image == 32
    assert (heads.score_thresh, heads.nms_thresh, heads.detections_per_img) == (0.3, 0.6, 7)
    dense = {**STAGES, "channels": 24, "pool_scales": [2, 4], "auxiliary_channels": 9}
    own = build_segmenter("resnet18", num_classes=4, dense=dense, drop_path_rate=0.1)
    assert own.head.channels == 24
    assert own.head.pool_scales == (2, 4)
    assert own.auxiliary_head.channels == 9
    assert own.maps.backbone.layer4[1].drop_path.drop_prob == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["vim_nano_patch4_32", "mambar_nano_patch4_32"])
def test_a_detector_with_selective_scans_learns_everywhere(name):
    backbone = {"img_size": 64, "patch_size": 8, "embed_dim": 48, "depth": 4}
    own = build_detector(name, num_classes=3, dense=NANO_DETECTOR, **backbone)
    losses = own([torch.randn(3, 64, 72)], [target((64, 72), (4, 4, 40, 40))])
    sum(losses.values()).backward()
    assert all(p.grad is not None for p in own.maps.parameters())
    assert [type(block).__name__ for block in own.blocks] == ["MambaBlock"] * 4


def test_a_plain_backbone_gets_an_adapter():
    with torch.device("meta"):
        own = build_detector("vittt_tiny_patch16_224", num_classes=80, dense={})
        narrow = {"adapter": {"conv_width": 16}, "channels": 64}
        other = build_segmenter("deit_tiny_patch16_224", num_classes=5, dense=narrow, depth=4)
    assert count_parameters(own.maps) == 9_224_888
    assert len(own.blocks) == 12
    assert len(other.blocks) == 4
    assert {p.shape[0] for p in other.maps.prior.stem.parameters()} == {16}
    layers = group_parameters(own, own.group_matcher(), reverse=True)
    assert layers["maps.backbone.blocks.11.norm.weight"] == 12
    assert layers["maps.level_embed"] == layers["heads.box_head.fc6.weight"] == 13
    assert {"maps.level_embed", "maps.backbone.pos_embed"} <= own.no_weight_decay()


@pytest.mark.parametrize(
    ("name", "adapter", "told"),
    [
        ("vittt_tiny_patch16_224", {"conv_with": 1}, "has no 'conv_with'; nearest: conv_width"),
        ("vittt_tiny_patch16_224", {"points": 0}, r"'adapter' of vittt_tiny_patch16_224, .*points"),
        ("resnet18", {}, r"resnet18 cannot be built with .*dynamic_img_size"),
    ],
)
def test_an_adapter_that_cannot_be_built_is_named(name, adapter, told):
    with torch.device("meta"), pytest.raises(DenseModelError, match=told):
        build_detector(name, num_classes=3, dense={"adapter": adapter})


BAD = {
    "model": ("hvit3_tinny", {}, {}, r"unknown model 'hvit3_tinny'; nearest: hvit3_tiny"),
    "key": ("resnet18", {"chanels": 3}, {}, "dense has no 'chanels'; nearest: channels"),
    "maps": ("resnet18", {"maps": "ladder"}, {}, "accepted: adapter, pyramid, stages"),
    "maps type": ("resnet18", {"maps": ["stages"]}, {}, r"dense.maps is \['stages'\]; accepted"),
    "other": (
        "resnet18",
        {"adapter": {"points": 4}},
        {},
        "adapter is given, but dense.maps is 'st",
    ),
    "stages key": ("resnet18", {"stages": {"norm": True}}, {}, "has no 'norm'; nearest: norms"),
    "no mapping": ("resnet18", {"stages": [1]}, {}, r"dense.stages is \[1\]; accepted: a mapping"),
    "plain": ("vit3_tiny_patch16_224", {}, {}, "no maps of stride 4, 8, 32, its strides are 16"),
    "backbone": ("resnet18", {}, {"depth": 3}, "resnet18 cannot be built with .*'depth': 3"),
    "file": ("resnet18", {}, {"checkpoint_path": "w.pth"}, "may not hold checkpoint_path"),
    "type": ("resnet18", {"channels": 1.5}, {}, "channels is 1.5; accepted: whole numbers"),
    "range": ("resnet18", {"channels": 0}, {}, "dense: channels is 0; accepted: above 0"),
    "size": ("resnet18", {"channels": 10**9}, {}, "channels is 1000000000; .* at most 65,536"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("build", [build_detector, build_segmenter])
def test_what_cannot_be_built_is_named(build, case):
    name, dense, arguments, told = BAD[case]
    with pytest.raises(DenseModelError, match=told):
        build(name, num_classes=3, dense={**STAGES, **dense}, **arguments)


@pytest.mark.parametrize("build", [build_detector, build_segmenter])
def test_dense_is_a_mapping(build):
    with pytest.raises(DenseModelError, match="dense is None; accepted: a mapping"):
        build("resnet18", num_classes=3, dense=None)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"anchor_sizes": [8, 16]}, r"anchor_sizes is \[8, 16\]; it must have 5 entries"),
        ({"anchor_sizes": 8}, "anchor_sizes is 8; accepted: a list of numbers"),
        ({"anchor_ratios": ["1"]}, r"anchor_ratios is \['1'\]; accepted: numbers"),
        ({"mask_channels": [True]}, r"mask_channels is \[True\]; accepted: whole numbers"),
        ({"score_threshold": 1.5}, "score_threshold is 1.5; accepted: 0 to 1"),
    ],
)
def test_sizes_out_of_range_are_named(sizes, told):
    with pytest.raises((TypeError, ValueError), match=told):
        DetectorSizes(**sizes)


def nano_models() -> list[DenseModel]:
    return [
        Detector(StageMaps(nano_h_vit3()), 3, DetectorSizes(**NANO_DETECTOR)),
        Segmenter(StageMaps(nano_h_vit3()), 3, SegmenterSizes(**NANO_SEGMENTER)),
    ]


@pytest.mark.parametrize(
    "name", ["hvit3_tiny", "resnet18", "convnext_atto", "deit_tiny_patch16_224"]
)
def test_the_backbone_keeps_its_layers_and_the_rest_is_the_last(name):
    with torch.device("meta"):
        plain = name.startswith("deit")
        own = DenseModel(ConvMaps() if plain else StageMaps(name, norms=False))
        if plain:
            own.maps.backbone = timm.create_model(name, num_classes=0)
        own.head = nn.Linear(3, 3)
    for coarse in (False, True):
        matcher = own.maps.backbone.group_matcher(coarse=coarse)
        wanted = group_parameters(own.maps.backbone, matcher, reverse=True)
        got = group_parameters(own, own.group_matcher(coarse=coarse), reverse=True)
        assert {name: got[f"maps.backbone.{name}"] for name in wanted} == wanted
        assert got["head.weight"] == got["head.bias"] == 1 + max(wanted.values())
    if plain:
        assert own.no_weight_decay() >= {"maps.backbone.pos_embed", "maps.backbone.cls_token"}


def test_layer_decay_and_weight_decay_reach_the_parameters():
    for own in nano_models():
        optimizer = create_optimizer_v2(own, opt="adamw", lr=1.0, weight_decay=0.1, layer_decay=0.5)
        rate, decay = {}, {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                rate[id(parameter)] = group["lr_scale"]
                decay[id(parameter)] = group["weight_decay"]
        stages = own.maps.backbone.stages
        assert rate[id(stages[3].blocks[0].norm1.weight)] == 0.5
        assert rate[id(stages[2].blocks[1].norm1.weight)] == 0.25
        assert rate[id(own.maps.norms[0].weight)] == 1
        names = own.no_weight_decay()
        assert names
        assert all(name.startswith("maps.backbone.stages.") for name in names)
        assert {decay[id(own.get_parameter(name))] for name in names} == {0.0}
        assert decay[id(own.maps.norms[0].weight)] == 0
        assert {rate[id(parameter)] for parameter in own.get_classifier().parameters()} == {1.0}


def test_a_frozen_backbone_rests_and_the_rest_learns():
    for own in nano_models():
        freeze_layers(own, "all")
        training_mode(own)
        assert not any(module.training for module in own.maps.backbone.modules())
        assert own.training
        assert own.maps.norms.training
        if isinstance(own, Detector):
            losses = own([torch.randn(3, 64, 64)], [target((64, 64), (4, 4, 40, 40))])
            sum(losses.values()).backward()
        else:
            sum(x.mean() for x in own(torch.randn(2, 3, 64, 64), auxiliary=True)).backward()
        for name, parameter in own.named_parameters():
            assert parameter.requires_grad is not name.startswith("maps.backbone."), name
            assert (parameter.grad is not None) is parameter.requires_grad, name


def test_some_layers_can_be_frozen():
    own, _ = nano_models()
    freeze_layers(own, 2)
    frozen = {name for name, p in own.named_parameters() if not p.requires_grad}
    assert frozen
    assert all(
        name.startswith(("maps.backbone.stem.", "maps.backbone.stages.0.")) for name in frozen
    )
    with pytest.raises(ConfigError, match="has 6 beside its head"):
        freeze_layers(own, 7)


def test_the_classifier_and_the_backbone_are_everything():
    for own in nano_models():
        rest = {id(p) for p in own.get_classifier().parameters()}
        backbone = {id(p) for p in own.maps.backbone.parameters()}
        assert not rest & backbone
        assert rest | backbone == {id(p) for p in own.parameters()}


def test_the_classes_decide_the_size_of_the_class_layers_alone():
    for first in nano_models():
        maps = StageMaps(nano_h_vit3())
        other = (
            Detector(maps, 5, DetectorSizes(**NANO_DETECTOR))
            if isinstance(first, Detector)
            else Segmenter(maps, 5, SegmenterSizes(**NANO_SEGMENTER))
        )
        shapes = {name: x.shape for name, x in other.state_dict().items()}
        others = {name for name, x in first.state_dict().items() if x.shape != shapes[name]}
        prefixes = tuple(f"{layer}." for layer in first.class_layers)
        assert others == {name for name in shapes if name.startswith(prefixes)}
        assert {name.rpartition(".")[2] for name in others} == {"weight", "bias"}


def test_blocks_are_the_backbones():
    own, _ = nano_models()
    assert [type(block).__name__ for block in own.blocks] == ["ViT3Block"] * 5
    assert own.blocks[4] is own.maps.backbone.stages[3].blocks[0]
    assert build_detector("resnet18", num_classes=3, dense=STAGES).blocks == []


def test_checkpointing_reaches_the_backbone():
    own, _ = nano_models()
    own.set_grad_checkpointing()
    assert all(stage.grad_checkpointing for stage in own.maps.backbone.stages)
    own.set_grad_checkpointing(False)
    assert not any(stage.grad_checkpointing for stage in own.maps.backbone.stages)


def test_a_backbone_without_layers_is_named():
    own = DenseModel(ConvMaps())
    own.maps.backbone = nn.Linear(3, 3)
    with pytest.raises(DenseModelError, match=r"Linear does not name its layers \(group_matcher\)"):
        own.group_matcher()


def test_example_inputs_are_a_call():
    detector, _ = nano_models()
    found = detector.eval()(*detector.example_inputs(torch.randn(2, 3, 64, 64)))
    assert len(found) == 2
    assert NANO_H_VIT3["dims"] == detector.maps.channels


def test_images_have_the_backbones_channels():
    """timm's models name their number of channels as ours do."""
    arguments = {"num_classes": 2, "in_chans": 1}
    segmenter = build_segmenter("resnet18", dense={**STAGES, **NANO_SEGMENTER}, **arguments)
    assert segmenter.eval()(torch.randn(1, 1, 64, 64)).shape == (1, 2, 64, 64)
    with pytest.raises(ValueError, match=r"images must be \[B, 1, H, W\], got \[1, 3, 64, 64\]"):
        segmenter(torch.randn(1, 3, 64, 64))
    detector = build_detector(
        "hvit3_tiny", dense={**STAGES, **NANO_DETECTOR}, **NANO_H_VIT3, **arguments
    ).eval()
    (found,) = detector([torch.randn(1, 64, 64)])
    assert found["masks"].shape[1:] == (1, 64, 64)
    with pytest.raises(ValueError, match=r"images\[0\] must be a tensor \[1, h, w\], got \[3, "):
        detector([torch.randn(3, 64, 64)])
