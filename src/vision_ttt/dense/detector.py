"""Mask R-CNN: boxes, classes and masks of the objects in images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.models.detection.transform import resize_boxes

from vision_ttt.dense.detector_parts import (
    LEVELS,
    make_proposal_network,
    make_pyramid,
    make_region_heads,
)
from vision_ttt.dense.model import DenseModel
from vision_ttt.dense.sizes import DetectorSizes

_MULTIPLE = 32
"""Pixels; batches are padded to multiples of the coarsest map's stride."""

_CHECKED = {"boxes": torch.float32, "labels": torch.int64, "masks": torch.uint8}


class Detector(DenseModel):
    """Mask R-CNN with a feature pyramid, of torchvision's parts.

    He et al., "Mask R-CNN", 2017; Lin et al., "Feature Pyramid Networks", 2017. Anchors, numbers of
    samples and thresholds are those of mmdet's configuration, on which the papers of Vision-TTT and
    ViT³ build. Three details are torchvision's: losses of boxes are smooth L1 with β = 1/9 (mmdet:
    L1), RoIAlign samples 2 × 2 points per cell and shifts nothing by half a pixel (mmdet: as many
    points as pixels, shifted), and an object that no region overlaps by half is matched to none.

    Args:
        maps: a map module, see :class:`vision_ttt.dense.model.DenseModel`.
        num_classes: of objects, without the background; at least 1.
        sizes: of pyramid and heads.
    """

    class_layers = ("heads.box_predictor", "heads.mask_predictor.mask_fcn_logits")

    def __init__(
        self, maps: nn.Module, num_classes: int, sizes: DetectorSizes | None = None
    ) -> None:
        super().__init__(maps)
        if num_classes < 1:
            raise ValueError(f"num_classes is {num_classes}; accepted: 1 and above")
        sizes = sizes or DetectorSizes()
        self.num_classes = num_classes
        self.pyramid = make_pyramid(maps.channels, sizes)
        self.proposals = make_proposal_network(sizes)
        self.heads = make_region_heads(num_classes, sizes)

    def forward(
        self,
        images: Sequence[Tensor],
        targets: Sequence[Mapping[str, Tensor]] | None = None,
        sizes: Sequence[tuple[int, int]] | None = None,
        *,
        pasted: bool = True,
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """The losses of images with targets, or the objects found in images.

        Args:
            images: each [C, h, w], resized and normalised. A batch is padded with zeros, right and
                bottom, to the largest of its images and multiples of 32.
            targets: in training, per image ``boxes`` [n, 4] float32, (x0, y0, x1, y1) in the
                image's pixels, ``labels`` [n] int64 from 1, and ``masks`` [n, h, w] uint8, 1 where
                the object is. n may be 0.
            sizes: in evaluation, per image the height and width in pixels that boxes and masks
                refer to; None for those of the images.
            pasted: in evaluation, whether masks are of the whole image, which takes 4 bytes per
                object and pixel, or only of their boxes.

        Returns:
            In training a dict of scalar losses: ``loss_objectness`` and ``loss_rpn_box_reg`` of
            the proposals, ``loss_classifier``, ``loss_box_reg`` and ``loss_mask`` of the heads.
            In evaluation per image a dict of ``boxes`` [n, 4], ``labels`` [n], ``scores`` [n], in
            descending order, and ``masks`` [n, 1, height, width], the probabilities of belonging
            to the object; not pasted they are [n, 1, 28, 28], to be spread over the boxes by
            torchvision's ``paste_masks_in_image``.

        Raises:
            ValueError: images, targets or sizes do not fit; targets in evaluation or none in
                training. The numbers in boxes and labels are checked on a CPU only: on another
                device the check would wait for it.
            FloatingPointError: in evaluation the maps are NaN or infinite.
        """
        if self.training != (targets is not None):
            mode = "training" if self.training else "evaluation"
            raise ValueError(f"targets must be given in training and only there; this is {mode}")
        shapes = _check_images(images, self.in_chans)
        if sizes is not None and (
            len(sizes) != len(shapes) or any(len(size) != 2 or min(size) < 1 for size in sizes)
        ):
            raise ValueError(f"sizes must be {len(shapes)} pairs of pixels, got {list(sizes)}")
        if targets is not None:
            _check_targets(targets, shapes, self.num_classes)
        batch = ImageList(_padded(images, shapes), shapes)
        maps = self.pyramid(dict(zip(LEVELS, self.maps(batch.tensors), strict=True)))
        # NaN yields no proposals: damaged weights would look like images without an object.
        if not self.training and not all(x.isfinite().all() for x in maps.values()):
            raise FloatingPointError("the maps of the images are NaN or infinite")
        regions, proposal_losses = self.proposals(batch, maps, targets)
        found, head_losses = self.heads(maps, regions, shapes, targets)
        if targets is not None:
            return {**proposal_losses, **head_losses}
        for detections, shape, size in zip(found, shapes, sizes or shapes, strict=True):
            detections["boxes"] = resize_boxes(detections["boxes"], list(shape), list(size))
            if pasted:
                detections["masks"] = paste_masks_in_image(
                    detections["masks"], detections["boxes"], tuple(size)
                )
        return found

    def example_inputs(self, images: Tensor) -> tuple[Any, ...]:
        """The arguments of a call on images [B, C, H, W]."""
        return (list(images),)


def _padded(images: Sequence[Tensor], shapes: Sequence[tuple[int, int]]) -> Tensor:
    height, width = (max(side) + -max(side) % _MULTIPLE for side in zip(*shapes, strict=True))
    batch = images[0].new_zeros(len(images), images[0].shape[0], height, width)
    for row, image in zip(batch, images, strict=True):
        row[:, : image.shape[1], : image.shape[2]] = image
    return batch


def _check_images(images: Sequence[Tensor], in_chans: int) -> list[tuple[int, int]]:
    """Heights and widths of the images."""
    if not len(images):
        raise ValueError("images is empty; at least one is needed")
    for index, image in enumerate(images):
        if not isinstance(image, Tensor) or image.ndim != 3 or image.shape[0] != in_chans:
            came = list(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(f"images[{index}] must be a tensor [{in_chans}, h, w], got {came}")
        if not image.is_floating_point():
            raise ValueError(f"images[{index}] must be floating, got {image.dtype}")
        if not image.numel():
            raise ValueError(f"images[{index}] has no pixels: {list(image.shape)}")
    return [(image.shape[1], image.shape[2]) for image in images]


def _check_targets(
    targets: Sequence[Mapping[str, Tensor]], shapes: Sequence[tuple[int, int]], num_classes: int
) -> None:
    if len(targets) != len(shapes):
        raise ValueError(f"targets must be one per image, {len(shapes)}, got {len(targets)}")
    for index, (target, shape) in enumerate(zip(targets, shapes, strict=True)):
        missing = [name for name in _CHECKED if name not in target]
        if missing:
            raise ValueError(f"targets[{index}] lacks {', '.join(missing)}")
        count = len(target["labels"])
        wanted = {"boxes": (count, 4), "labels": (count,), "masks": (count, *shape)}
        for name, dtype in _CHECKED.items():
            x = target[name]
            if tuple(x.shape) != wanted[name] or x.dtype != dtype:
                raise ValueError(
                    f"targets[{index}]['{name}'] must be {dtype} {list(wanted[name])}, got"
                    f" {x.dtype} {list(x.shape)}"
                )
        # On a device, reading the values would wait for it at each step.
        boxes, labels = target["boxes"], target["labels"]
        if not (boxes.is_cpu and labels.is_cpu):
            continue
        wrong = ~(boxes.isfinite().all(1) & (boxes[:, 2:] > boxes[:, :2]).all(1))
        if wrong.any():
            place = int(wrong.nonzero()[0])
            raise ValueError(
                f"targets[{index}], object {place}: the box {boxes[place].tolist()} must be finite"
                " (x0, y0, x1, y1) with x0 < x1 and y0 < y1"
            )
        wrong = (labels < 1) | (labels > num_classes)
        if wrong.any():
            place = int(wrong.nonzero()[0])
            raise ValueError(
                f"targets[{index}], object {place}: the label {int(labels[place])} must be from 1"
                f" to {num_classes}"
            )
