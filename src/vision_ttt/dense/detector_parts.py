"""Parts of Mask R-CNN: torchvision's, with fixed strides, and float32 where boxes are computed.

Under autocast torchvision's parts compute anchors and boxes in the features' type: in bfloat16 a
coordinate of 1000 pixels is rounded to a multiple of 4. Here a head's predictions, the anchors and
all that follows from them are float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool
from torchvision.ops.poolers import LevelMapper

from vision_ttt.dense.sizes import DetectorSizes

LEVELS = ("0", "1", "2", "3")
"""torchvision's names of the pyramid's levels with strides 4, 8, 16 and 32."""

_STRIDES = (4, 8, 16, 32, 64)


def make_pyramid(channels: Sequence[int], sizes: DetectorSizes) -> FeaturePyramidNetwork:
    """A feature pyramid: maps of strides 4 to 32 → maps of strides 4 to 64, equally wide."""
    return FeaturePyramidNetwork(list(channels), sizes.channels, LastLevelMaxPool())


def make_proposal_network(sizes: DetectorSizes) -> RegionProposalNetwork:
    """A network that proposes regions: 256 anchors of an image in its loss, half of them objects.

    Before NMS as many anchors of each level remain as proposals after it, in training twice as
    many.
    """
    anchors = Anchors(sizes.anchor_sizes, sizes.anchor_ratios)
    return RegionProposalNetwork(
        anchors,
        ProposalHead(sizes.channels, len(sizes.anchor_ratios)),
        fg_iou_thresh=0.7,
        bg_iou_thresh=0.3,
        batch_size_per_image=256,
        positive_fraction=0.5,
        pre_nms_top_n={"training": 2 * sizes.proposals, "testing": sizes.proposals},
        post_nms_top_n={"training": sizes.proposals, "testing": sizes.proposals},
        nms_thresh=0.7,
    )


def make_region_heads(num_classes: int, sizes: DetectorSizes) -> RoIHeads:
    """Box and mask head of ``num_classes`` classes of objects, and the background as class 0."""
    return RoIHeads(
        RegionAlign(sizes.box_resolution, sizes.canonical_size),
        TwoMLPHead(sizes.channels * sizes.box_resolution**2, sizes.box_features),
        BoxPredictor(sizes.box_features, num_classes + 1),
        fg_iou_thresh=0.5,
        bg_iou_thresh=0.5,
        batch_size_per_image=sizes.sampled_regions,
        positive_fraction=0.25,
        bbox_reg_weights=(10.0, 10.0, 5.0, 5.0),
        score_thresh=sizes.score_threshold,
        nms_thresh=sizes.nms_threshold,
        detections_per_img=sizes.detections,
        mask_roi_pool=RegionAlign(sizes.mask_resolution, sizes.canonical_size),
        mask_head=MaskRCNNHeads(sizes.channels, list(sizes.mask_channels), dilation=1),
        mask_predictor=MaskPredictor(
            sizes.mask_channels[-1], sizes.mask_channels[-1], num_classes + 1
        ),
    )


class Anchors(AnchorGenerator):
    """Anchors of a size per level at strides 4 to 64, each in every ratio of height to width.

    torchvision divides the images' size by the map's: where this is no whole number, its strides
    are others.
    """

    def __init__(self, sizes: Sequence[int], ratios: Sequence[float]) -> None:
        super().__init__(tuple((size,) for size in sizes), (tuple(ratios),) * len(sizes))

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        self.set_cell_anchors(torch.float32, feature_maps[0].device)
        grids = [list(x.shape[-2:]) for x in feature_maps]
        anchors = torch.cat(self.grid_anchors(grids, [[stride, stride] for stride in _STRIDES]))
        return [anchors] * len(image_list.image_sizes)


class ProposalHead(RPNHead):
    """torchvision's, with float32 predictions."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        scores, deltas = super().forward(x)
        return [each.float() for each in scores], [each.float() for each in deltas]


class BoxPredictor(FastRCNNPredictor):
    """torchvision's, with float32 predictions."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, deltas = super().forward(x)
        return scores.float(), deltas.float()


class MaskPredictor(MaskRCNNPredictor):
    """torchvision's, with float32 predictions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class RegionAlign(MultiScaleRoIAlign):
    """RoIAlign with 2 × 2 samples per cell: regions of images → [n, C, resolution, resolution].

    torchvision infers the levels' strides from the sizes of the first images that it sees, and
    keeps them: after small images they would be wrong.
    """

    def __init__(self, resolution: int, canonical_size: int) -> None:
        super().__init__(list(LEVELS), resolution, 2, canonical_scale=canonical_size)
        self.scales = [1 / stride for stride in _STRIDES[: len(LEVELS)]]
        self.map_levels = LevelMapper(2, 5, canonical_scale=canonical_size)

    def forward(
        self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> Tensor:
        maps = {level: x[level].float() for level in LEVELS}
        return super().forward(maps, boxes, image_shapes).to(x[LEVELS[0]].dtype)
