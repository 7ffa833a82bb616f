"""Multiply-adds of a detector, which depend on how many regions it looks at."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from vision_ttt.dense.detector import Detector
from vision_ttt.dense.detector_parts import LEVELS
from vision_ttt.models.evaluation_mode import evaluation_mode
from vision_ttt.ops import use_backend


@torch.no_grad()
def count_detector_macs(
    detector: Detector, size: tuple[int, int], *, regions: int = 1000, masks: int = 100
) -> int:
    """Multiply-adds of backbone, pyramid, proposals' head, box head and mask head on one image.

    The counts that papers print come from mmdet, whose tool runs the box head on 1000 regions and
    the mask head on 100. RoIAlign, box decoding and NMS are no products and count nothing.

    Args:
        detector: on any device; on the meta device nothing is computed.
        size: the image's height and width in pixels.
        regions: that the box head looks at.
        masks: regions that the mask head looks at.
    """
    weight = next(detector.parameters())
    height, width = (side + -side % 32 for side in size)
    image = weight.new_zeros(1, 3, height, width)
    heads = detector.heads
    channels = detector.pyramid.layer_blocks[0][0].out_channels

    def pooled(count: int, align: torch.nn.Module) -> torch.Tensor:
        return weight.new_zeros(count, channels, *align.output_size)

    counter = FlopCounterMode(display=False)
    with evaluation_mode(detector), use_backend(None), counter:
        maps = detector.pyramid(dict(zip(LEVELS, detector.maps(image), strict=True)))
        detector.proposals.head(list(maps.values()))
        heads.box_predictor(heads.box_head(pooled(regions, heads.box_roi_pool)))
        heads.mask_predictor(heads.mask_head(pooled(masks, heads.mask_roi_pool)))
    return counter.get_total_flops() // 2
