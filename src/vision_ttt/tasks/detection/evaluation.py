"""Evaluation of a detector: COCO's average precision of boxes and masks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import faster_coco_eval.core.mask as rle_masks
import numpy as np
from faster_coco_eval import COCO, COCOeval_faster
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import paste_masks_in_image

from vision_ttt.data import DatasetError
from vision_ttt.data.coco import CocoAnnotations
from vision_ttt.data.coco_checks import Rle
from vision_ttt.engine.evaluation import autocast
from vision_ttt.errors import DamagedModel

_LOGGER = logging.getLogger(__name__)

KINDS: tuple[Literal["box"], Literal["mask"]] = ("box", "mask")
MASK_THRESHOLD = 0.5
"""Probability above which a pixel is the object's."""
_SIZES = ("small", "medium", "large")
_CHUNK = 2**26  # pixels of the masks that are encoded at once
_ALL_SIZES, _MOST = 0, -1  # places among COCO's ranges of sizes and numbers of detections


@dataclass(frozen=True, eq=False)
class Detections:
    """The objects that a detector finds in one image, best first."""

    boxes: np.ndarray
    """Corners x, y, x, y [n, 4] float32 in pixels of the original image."""
    labels: np.ndarray
    """[n] int64, from 1."""
    scores: np.ndarray
    """[n] float32, from 0 to 1."""
    masks: list[Rle]
    """n masks, of the original image's size."""


@dataclass(frozen=True, eq=False)
class DetectionEvaluation:
    """How well a detector finds the objects of a test set."""

    metrics: Mapping[str, float]
    """COCO's average precision, from 0 to 1: box_ap (mean over IoU thresholds from 0.5 to 0.95),
    box_ap50, box_ap75, box_ap_small, _medium and _large, and mask_ap … likewise. Figures of sizes
    that no object has are left out."""
    classes: list[dict[str, Any]]
    """Per class its name, number of objects and the same figures; None where it has no object."""
    recalls: np.ndarray
    """[R] float64, from 0 to 1: where the curves have their points."""
    curves: Mapping[str, np.ndarray]
    """box and mask → precision [R, C] at IoU 0.5 by recall and class; NaN without an object."""
    found: list[tuple[int, Detections]]
    """Places of the images among the annotations, with what was found."""


def check_weights(model: nn.Module) -> None:
    """Check that a detector's weights are finite: with others it finds nothing, as in empty images.

    Raises:
        DamagedModel: one is not.
    """
    for name, weight in model.state_dict().items():
        if weight.is_floating_point() and not weight.isfinite().all():
            raise DamagedModel(f"the detector's weight {name} is NaN or infinite: it is damaged")


def detect(model: nn.Module, image: Tensor, size: tuple[int, int], precision: str) -> Detections:
    """Return what a detector finds in an image.

    Args:
        image: [3, h, w], normalised.
        size: height and width that it had before it was resized.
        precision: of autocast.

    Raises:
        DamagedModel: the detector computes NaN.
    """
    try:
        with autocast(image.device, precision):
            (output,) = model([image], sizes=[size], pasted=False)
    except FloatingPointError as error:
        reason = f"the detector finds nothing: {error}; its weights are damaged"
        raise DamagedModel(reason) from error
    return detections(output, size)


def detections(output: Mapping[str, Tensor], size: tuple[int, int]) -> Detections:
    """Return what a detector gave for one image, its masks encoded a few at a time.

    Args:
        output: boxes [n, 4], labels [n], scores [n] and masks [n, 1, m, m] of probabilities within
            the boxes.
        size: height and width of the image.
    """
    order = output["scores"].argsort(descending=True, stable=True)
    kept = {name: values[order].float() for name, values in output.items()}
    step = max(_CHUNK // (size[0] * size[1]), 1)
    encoded: list[Rle] = []
    for start in range(0, len(order), step):
        part = slice(start, start + step)
        whole = paste_masks_in_image(kept["masks"][part], kept["boxes"][part], size)
        held = (whole[:, 0] > MASK_THRESHOLD).cpu().numpy()
        # The library reads columns, of all masks together.
        encoded += rle_masks.encode(np.asfortranarray(held.transpose(1, 2, 0), dtype=np.uint8))
    return Detections(
        kept["boxes"].cpu().numpy(),
        output["labels"][order].cpu().numpy(),
        kept["scores"].cpu().numpy(),
        encoded,
    )


def summarise(
    annotations: CocoAnnotations, found: Sequence[tuple[int, Detections]]
) -> DetectionEvaluation:
    """Return the evaluation of what was found in images of `annotations`.

    Args:
        found: place of an image → its detections; images that are not among them do not count.

    Raises:
        DatasetError: the images have no object.
    """
    metrics: dict[str, float] = {}
    per_class: list[dict[str, Any]] = [{"class": name} for name in annotations.classes]
    curves: dict[str, np.ndarray] = {}
    truth = [each for place, _ in found for each in annotations.truth(place)]
    objects = Counter(each["category_id"] for each in truth if not each["iscrowd"])
    if not objects:
        raise DatasetError(f"the images of {annotations.path} that were tested have no object")
    for row, category in zip(per_class, annotations.category_ids, strict=True):
        row["objects"] = objects[category]
    for kind in KINDS:
        evaluated = _run(kind, annotations, truth, found)
        precision = np.asarray(evaluated.eval["precision"], dtype=np.float64)
        precision[precision < 0] = np.nan  # of classes without an object
        metrics |= {name: ap for name, ap in _figures(kind, precision) if ap is not None}
        for label, row in enumerate(per_class):
            row |= _figures(kind, precision[:, :, label : label + 1])
        curves[kind] = precision[0, :, :, _ALL_SIZES, _MOST]
    recalls = np.asarray(evaluated.params.recThrs, dtype=np.float64)
    return DetectionEvaluation(metrics, per_class, recalls, curves, list(found))


def results(
    annotations: CocoAnnotations, found: Sequence[tuple[int, Detections]]
) -> list[dict[str, Any]]:
    """Return what was found in COCO's format of results, RLEs with counts as bytes."""
    return [
        {"image_id": int(annotations.image_ids[place]), **entry}
        for place, own in found
        for entry in entries(own, annotations.category_ids)
    ]


def entries(own: Detections, category_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Return an image's detections in COCO's format of results, but for the image."""
    return [
        {
            "category_id": category_ids[label - 1],
            "bbox": [x0, y0, x1 - x0, y1 - y0],
            "score": score,
            "segmentation": mask,
        }
        for (x0, y0, x1, y1), label, score, mask in zip(
            own.boxes.astype(np.float64).tolist(),
            own.labels.tolist(),
            own.scores.astype(np.float64).tolist(),
            own.masks,
            strict=True,
        )
    ]


def _run(
    kind: Literal["box", "mask"],
    annotations: CocoAnnotations,
    truth: Sequence[Mapping[str, Any]],
    found: Sequence[tuple[int, Detections]],
) -> COCOeval_faster:
    """COCO's evaluation, accumulated, of boxes or of masks."""
    names = zip(annotations.category_ids, annotations.classes, strict=True)
    declared = {
        "images": [
            {"id": int(annotations.image_ids[place]), "height": int(height), "width": int(width)}
            for place, (height, width) in ((place, annotations.sizes[place]) for place, _ in found)
        ],
        "categories": [{"id": category, "name": name} for category, name in names],
    }
    # The size of what was found is that of the box or of the mask, whichever is compared.
    given = [
        {
            **entry,
            "iscrowd": 0,
            "area": entry["bbox"][2] * entry["bbox"][3]
            if kind == "box"
            else float(rle_masks.area(entry["segmentation"])),
        }
        for entry in results(annotations, found)
    ]
    evaluated = COCOeval_faster(
        *(
            # The library marks what is unmatched by the number 0: none may be an annotation's.
            COCO({**declared, "annotations": [{**e, "id": n} for n, e in enumerate(entries, 1)]})
            for entries in (truth, given)
        ),
        iouType="bbox" if kind == "box" else "segm",
        print_function=_LOGGER.debug,
    )
    evaluated.evaluate()
    evaluated.accumulate()
    return evaluated


def _figures(kind: str, precision: np.ndarray) -> list[tuple[str, float | None]]:
    """Average precisions by name of precision [T, R, C, sizes, numbers]; None without an object."""
    every = precision[:, :, :, _ALL_SIZES, _MOST]
    parts = {
        "ap": every,
        "ap50": every[0],
        "ap75": every[5],
        **{
            f"ap_{size}": precision[:, :, :, place, _MOST]
            for place, size in enumerate(_SIZES, start=1)
        },
    }
    return [
        (f"{kind}_{name}", None if np.isnan(part).all() else float(np.nanmean(part)))
        for name, part in parts.items()
    ]
