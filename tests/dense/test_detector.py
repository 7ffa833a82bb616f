"""Mask R-CNN: torchvision's results, every size of image, targets that do not fit."""

import pytest
import torch
from torch import nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.ops import MultiScaleRoIAlign, roi_align

import vision_ttt
from dense_maps import NANO_DETECTOR, ConvMaps, nano_h_vit3, target
from tolerances import assert_close
from vision_ttt.dense.detector import Detector
from vision_ttt.dense.detector_parts import Anchors, RegionAlign
from vision_ttt.dense.sizes import DetectorSizes
from vision_ttt.dense.stage_maps import StageMaps

CLASSES = 3
LOSSES = {"loss_objectness", "loss_rpn_box_reg", "loss_classifier", "loss_box_reg", "loss_mask"}


def detector(maps: nn.Module | None = None, **sizes: object) -> Detector:
    torch.manual_seed(0)
    sizes = DetectorSizes(**{**NANO_DETECTOR, **sizes})
    return Detector(ConvMaps() if maps is None else maps, CLASSES, sizes)


def batch():
    """Two images of several sizes, the first with three objects, the second with one."""
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(3, *size, generator=generator) for size in ((64, 128), (64, 90))]
    targets = [
        target((64, 128), (4, 4, 40, 50), (30, 10, 60, 60), (70, 20, 120, 60)),
        target((64, 90), (10, 20, 30, 40)),
    ]
    return images, targets


class _PyramidMaps(nn.Module):
    """Map module and pyramid as torchvision's MaskRCNN calls them."""

    def __init__(self, own: Detector) -> None:
        super().__init__()
        self.maps, self.pyramid = own.maps, own.pyramid
        self.out_channels = NANO_DETECTOR["channels"]

    def forward(self, images):
        return self.pyramid(dict(zip("0123", self.maps(images), strict=True)))


def torchvisions(own: Detector, **settings: object) -> MaskRCNN:
    """torchvision's Mask R-CNN of the same sizes and weights."""
    width, features = NANO_DETECTOR["channels"], NANO_DETECTOR["box_features"]
    masks, scale = NANO_DETECTOR["mask_channels"], NANO_DETECTOR["canonical_size"]
    levels = ["0", "1", "2", "3"]
    sizes = tuple((size,) for size in NANO_DETECTOR["anchor_sizes"])
    model = MaskRCNN(
        _PyramidMaps(own),
        min_size=64,
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        rpn_anchor_generator=AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 5),
        rpn_pre_nms_top_n_train=100,
        rpn_pre_nms_top_n_test=50,
        rpn_post_nms_top_n_train=50,
        rpn_post_nms_top_n_test=50,
        box_roi_pool=MultiScaleRoIAlign(levels, 7, 2, canonical_scale=scale),
        box_head=TwoMLPHead(width * 49, features),
        box_predictor=FastRCNNPredictor(features, CLASSES + 1),
        box_batch_size_per_image=32,
        mask_roi_pool=MultiScaleRoIAlign(levels, 14, 2, canonical_scale=scale),
        mask_head=MaskRCNNHeads(width, masks, 1),
        mask_predictor=MaskRCNNPredictor(masks[-1], masks[-1], CLASSES + 1),
        _skip_resize=True,
        **settings,
    )
    model.rpn.load_state_dict(own.proposals.state_dict())
    model.roi_heads.load_state_dict(own.heads.state_dict())
    return model


def test_losses_and_gradients_are_torchvisions():
    own = detector()
    images, targets = batch()
    theirs = torchvisions(own)
    gradients = []
    for model in (own, theirs):
        torch.manual_seed(5)
        losses = model(images, targets)
        own.zero_grad()
        sum(losses.values()).backward()
        gradients.append((losses, own.pyramid.layer_blocks[0][0].weight.grad.clone()))
    (got, own_gradient), (wanted, their_gradient) = gradients
    assert set(got) == LOSSES
    for name in LOSSES:
        assert torch.equal(got[name], wanted[name]), name
        assert got[name] > 0
    assert torch.equal(own_gradient, their_gradient)


def test_detections_at_the_original_size_are_torchvisions():
    own = detector(score_threshold=0.2).eval()
    # torchvision scales an image up to 64 pixels; the size of its result is the original one.
    small = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(2))
    (wanted,) = torchvisions(own, box_score_thresh=0.2).eval()([small])
    image = nn.functional.interpolate(small[None], size=(64, 128), mode="bilinear")[0]
    (got,) = own([image], sizes=[(32, 64)])
    assert len(got["boxes"]) > 5
    assert got["masks"].shape == (len(got["boxes"]), 1, 32, 64)
    assert set(got["labels"].tolist()) <= {1, 2, 3}
    for name in ("boxes", "labels", "scores", "masks"):
        assert torch.equal(got[name], wanted[name]), name


def test_masks_of_boxes_are_those_of_the_image_before_pasting():
    own = detector(score_threshold=0.2).eval()
    image = batch()[0][0]
    (whole,), (bare,) = (own([image], sizes=[(32, 64)], pasted=pasted) for pasted in (True, False))
    assert bare["masks"].shape == (len(whole["masks"]), 1, 28, 28)
    assert torch.equal(bare["boxes"], whole["boxes"])
    pasted = paste_masks_in_image(bare["masks"], bare["boxes"], (32, 64))
    assert torch.equal(pasted, whole["masks"])


def test_padding_does_not_count():
    own = detector(score_threshold=0.2).eval()
    image, _ = batch()[0]
    alone, _ = own([image, image])
    padded, _ = own([image, torch.zeros(3, 64, 128)])
    assert len(alone["boxes"])
    assert torch.equal(alone["boxes"], padded["boxes"])
    (found,) = own([image[:, :50, :70]])
    assert found["boxes"][:, 0::2].max() <= 70
    assert found["boxes"][:, 1::2].max() <= 50


@pytest.mark.parametrize("size", [(33, 70), (64, 1), (1, 1)])
def test_odd_sizes(size):
    own = detector(StageMaps(nano_h_vit3()))
    x1, y1 = (max(1, side // 2) for side in reversed(size))
    losses = own([torch.randn(3, *size)] * 2, [target(size, (0, 0, x1, y1))] * 2)
    assert set(losses) == LOSSES
    assert all(loss.isfinite() for loss in losses.values())
    own.heads.score_thresh = 0.0
    (found,) = own.eval()([torch.randn(3, *size)])
    assert len(found["boxes"])
    assert found["masks"].shape[2:] == size


@pytest.mark.parametrize("empty", ["one", "all"])
def test_images_without_objects_train_every_part(empty):
    own = detector(StageMaps(nano_h_vit3()))
    images, targets = batch()
    without = target((64, 128))
    targets = [without, target((64, 90)) if empty == "all" else targets[1]]
    losses = own(images, targets)
    assert all(loss.isfinite() for loss in losses.values())
    assert (losses["loss_mask"] == 0) == (empty == "all")
    sum(losses.values()).backward()
    assert not [name for name, p in own.named_parameters() if p.grad is None]


def test_a_seeded_run_gives_the_same_bits():
    def run():
        torch.manual_seed(3)
        own = detector(StageMaps(nano_h_vit3(drop_path_rate=0.2)))
        optimizer = torch.optim.AdamW(own.parameters(), 1e-3)
        for _ in range(2):
            losses = own(*batch())
            optimizer.zero_grad()
            sum(losses.values()).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in own.parameters()])

    first = run()
    assert torch.equal(run(), first)


def test_under_autocast_boxes_stay_exact():
    generator = torch.Generator().manual_seed(0)
    maps = [torch.randn(1, 8, 320 // s, 1344 // s, generator=generator) for s in (4, 8, 16, 32)]
    maps.append(maps[-1][:, :, ::2, ::2])
    anchors = Anchors((32, 64, 128, 256, 512), (0.5, 1.0, 2.0))
    images = ImageList(torch.empty(1, 3, 320, 1344), [(320, 1333)])
    (wanted,), (got,) = (anchors(images, [x.to(t) for x in maps]) for t in (None, torch.bfloat16))
    assert got.dtype == torch.float32
    assert torch.equal(got, wanted)

    named = dict(zip("0123", maps, strict=False))
    halves = {name: x.bfloat16() for name, x in named.items()}
    boxes = [torch.tensor([[1001.3, 7.7, 1017.9, 31.1], [513.0, 3.0, 1201.0, 307.0]])]
    pool = RegionAlign(7, 224)
    got = pool(halves, boxes, [(320, 1333)])
    assert got.dtype == torch.bfloat16
    assert_close(got, pool(named, boxes, [(320, 1333)]), 1e-2)

    own = detector(score_threshold=0.2)
    losses = []
    for enabled in (False, True):
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses.append(own(*batch()))
    for name in LOSSES:
        assert losses[1][name].dtype == torch.float32
        assert_close(losses[1][name], losses[0][name], 2e-3)  # relative: some are 1e-2
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = own.eval()(batch()[0][:1])
    assert {found[name].dtype for name in ("boxes", "scores", "masks")} == {torch.float32}
    assert not torch.equal(found["boxes"], found["boxes"].bfloat16().float())


def test_strides_are_not_inferred_from_the_images():
    anchors = Anchors((32, 64, 128, 256, 512), (1.0,))
    maps = [torch.zeros(1, 1, -(-96 // s), -(-96 // s)) for s in (4, 8, 16, 32, 64)]
    (found,) = anchors(ImageList(torch.empty(1, 3, 96, 96), [(96, 96)]), maps)
    assert found[-1].tolist() == [64 - 256, 64 - 256, 64 + 256, 64 + 256]
    pool = RegionAlign(7, 224)
    # An image of 20 × 20 pixels in a batch of 32 × 32: its maps look larger than they are.
    pool({str(i): torch.zeros(1, 1, 8 >> i, 8 >> i) for i in range(4)}, [found[:1]], [(20, 20)])
    maps = {str(i): torch.randn(1, 2, 64 >> i, 64 >> i) for i in range(4)}
    boxes = torch.tensor([[3.0, 4.0, 50.0, 60.0]])
    wanted = roi_align(maps["0"], [boxes], 7, spatial_scale=0.25, sampling_ratio=2)
    assert torch.equal(pool(maps, [boxes], [(256, 256)]), wanted)


BAD_TARGETS = {
    "no width": ("boxes", [[5.0, 4, 5, 50]], r"object 0: the box \[5.0, 4.0, 5.0, 50.0\] must"),
    "nan": ("boxes", [[float("nan"), 4, 5, 50]], r"targets\[1\], object 0: the box \[nan"),
    "infinite": ("boxes", [[0.0, 4, float("inf"), 50]], "must be finite"),
    "background": ("labels", [0], r"targets\[1\], object 0: the label 0 must be from 1 to 3"),
    "no such class": ("labels", [4], "the label 4 must be from 1 to 3"),
    "more labels": (
        "labels",
        [1, 2],
        r"targets\[1\]\['boxes'\] must be .* \[2, 4\], got .* \[1, 4",
    ),
    "float labels": ("labels", [1.0], r"'labels'\] must be torch.int64 \[1\], got torch.float32"),
}


@pytest.mark.parametrize("case", BAD_TARGETS)
def test_targets_that_do_not_fit_are_named(case):
    name, value, told = BAD_TARGETS[case]
    images, targets = batch()
    targets[1][name] = torch.tensor(value)
    with pytest.raises(ValueError, match=told):
        detector()(images, targets)


def test_targets_on_a_device_are_not_waited_for():
    class Reached(Exception):
        pass

    def reached(*_: object) -> None:
        raise Reached

    own = detector()
    own.maps.register_forward_pre_hook(reached)
    images, targets = batch()
    there = [{name: x.to("meta") for name, x in target.items()} for target in targets]
    with pytest.raises(Reached):  # a value of a meta tensor cannot be read
        own([image.to("meta") for image in images], there)
    there[1]["labels"] = there[1]["labels"].float()
    with pytest.raises(ValueError, match=r"must be torch\.int64"):
        own([image.to("meta") for image in images], there)


def test_arguments_that_do_not_fit_are_named():
    own = detector()
    images, targets = batch()
    masks = {**targets[1], "masks": targets[1]["masks"][:, :32]}
    with pytest.raises(ValueError, match=r"masks'\] must be .* \[1, 64, 90\], got .* \[1, 32, 90"):
        own(images, [targets[0], masks])
    with pytest.raises(ValueError, match=r"targets\[0\] lacks labels, masks"):
        own(images, [{"boxes": targets[0]["boxes"]}] * 2)
    with pytest.raises(ValueError, match="targets must be one per image, 2, got 1"):
        own(images, targets[:1])
    with pytest.raises(ValueError, match="only there; this is training"):
        own(images)
    own.eval()
    with pytest.raises(ValueError, match="only there; this is evaluation"):
        own(images, targets)
    with pytest.raises(ValueError, match="images is empty"):
        own([])
    with pytest.raises(ValueError, match=r"images\[1\] must be a tensor \[3, h, w\], got \[1, 64"):
        own([images[0], images[1][:1]])
    with pytest.raises(ValueError, match=r"images\[0\] must be floating, got torch.uint8"):
        own([images[0].byte()])
    with pytest.raises(ValueError, match=r"images\[0\] has no pixels: \[3, 0, 128\]"):
        own([images[0][:, :0]])
    with pytest.raises(ValueError, match=r"sizes must be 2 pairs of pixels, got \[\(64, 0\)"):
        own(images, sizes=[(64, 0), (1, 1)])
    with pytest.raises(ValueError, match="num_classes is 0; accepted: 1 and above"):
        Detector(ConvMaps(), 0)


@pytest.mark.parametrize("level", [0, 3])
def test_nan_in_any_map_is_an_error(level: int) -> None:
    own = detector(StageMaps(nano_h_vit3())).eval()
    nn.init.constant_(own.pyramid.layer_blocks[level][0].weight, float("nan"))
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        own(batch()[0])


def test_for_inference_finds_the_same():
    own = detector(StageMaps(nano_h_vit3(dims=(32, 32, 64, 96))), score_threshold=0.2).eval()
    images, _ = batch()
    fast = vision_ttt.for_inference(own, strict=True)
    for got, wanted in zip(fast(images), own(images), strict=True):
        assert torch.equal(got["labels"], wanted["labels"])
        assert len(got["labels"])
        assert_close(got["boxes"], wanted["boxes"], 1e-4)
        assert_close(got["masks"], wanted["masks"], 1e-3)
    own.heads.score_thresh = 1.0
    assert len(vision_ttt.for_inference(own)(images)[0]["masks"]) == 0
