"""Average precision: that of pycocotools on the same detections, and what has none."""

import contextlib
import copy
import io
import json
from pathlib import Path
from typing import Any

import faster_coco_eval.core.mask as rle_masks
import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torchvision.models.detection.roi_heads import paste_masks_in_image

from coco_files import annotation, rectangle, write_file, write_part
from vision_ttt.data import DatasetError
from vision_ttt.data.coco import CocoAnnotations
from vision_ttt.data.coco_reading import read_coco
from vision_ttt.tasks.detection import evaluation
from vision_ttt.tasks.detection.evaluation import Detections, detections, results, summarise

SIZE = (200, 160)
_NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


def _noisy(told: CocoAnnotations, seed: int, most: int = 12) -> list[tuple[int, Detections]]:
    """Detections that miss, shift, repeat and confuse what is there; some scores are equal."""
    generator = np.random.default_rng(seed)
    width, height = SIZE
    found = []
    for place in range(len(told)):
        masks, labels = [], []
        for truth in told.truth(place):
            for _ in range(generator.integers(0, 3)):
                held = rle_masks.decode(truth["segmentation"])
                masks.append(np.roll(held, tuple(generator.integers(-6, 7, 2)), axis=(0, 1)))
                right = told.category_ids.index(truth["category_id"]) + 1
                labels.append(right if generator.random() < 0.8 else 3 - right)
        for _ in range(generator.integers(0, most)):
            mask = np.zeros((height, width), dtype=np.uint8)
            x, y = generator.integers(0, width - 20), generator.integers(0, height - 20)
            high, wide = generator.integers(3, 60, 2)
            mask[y : y + high, x : x + wide] = 1
            if generator.random() < 0.5:  # a frame, of a much smaller area than its box
                mask[y + 1 : y + high - 1, x + 1 : x + wide - 1] = 0
            masks.append(mask)
            labels.append(int(generator.integers(1, 3)))
        scores = np.sort(generator.random(len(masks)).astype(np.float32).round(2))[::-1]
        packed = [rle_masks.encode(np.asfortranarray(mask)) for mask in masks]
        boxes = np.array([rle_masks.toBbox(mask) for mask in packed], dtype=np.float32)
        boxes = boxes.reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        labels = np.array(labels, dtype=np.int64)
        found.append((place, Detections(boxes, labels, scores, packed)))
    return found


def _theirs(path: Path, entries: list[dict[str, Any]], kind: str) -> COCOeval:
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(path))
        given = copy.deepcopy(entries)
        for entry in given:  # with a box, they would take its area for the mask's
            entry.pop("segmentation" if kind == "box" else "bbox")
        evaluated = COCOeval(truth, truth.loadRes(given), "bbox" if kind == "box" else "segm")
        evaluated.evaluate()
        evaluated.accumulate()
        evaluated.summarize()
    return evaluated


@pytest.mark.parametrize("seed", [0, 1])
def test_it_is_that_of_pycocotools(tmp_path: Path, seed: int) -> None:
    path = write_part(tmp_path, "val", 25, seed=seed + 10, size=SIZE)
    told = read_coco(path)
    found = _noisy(told, seed, most=130 if seed else 12)
    own = summarise(told, found)
    for kind in ("box", "mask"):
        theirs = _theirs(path, results(told, found), kind)
        for name, value in zip(_NAMES, theirs.stats[:6].tolist(), strict=True):
            if value == -1:
                assert f"{kind}_{name}" not in own.metrics
            else:
                assert own.metrics[f"{kind}_{name}"] == pytest.approx(value, abs=1e-12)
        precision = theirs.eval["precision"]
        np.testing.assert_allclose(own.curves[kind], precision[0, :, :, 0, 2], atol=1e-12)
        for label, row in enumerate(own.classes):
            assert row[f"{kind}_ap"] == pytest.approx(
                precision[:, :, label, 0, 2].mean(), abs=1e-12
            )
        assert 0.05 < own.metrics[f"{kind}_ap50"] < 0.95
    assert sum(row["objects"] for row in own.classes) == told.counts.objects


def test_the_answer_of_predict_is_evaluated_alike(tmp_path: Path) -> None:
    """Through JSON, as pycocotools reads it."""
    path = write_part(tmp_path, "val", 6, seed=5, size=SIZE)
    told = read_coco(path)
    found = _noisy(told, 5)
    entries = results(told, found)
    for entry in entries:
        mask = entry["segmentation"]
        entry["segmentation"] = {"size": mask["size"], "counts": mask["counts"].decode()}
    stats = _theirs(path, json.loads(json.dumps(entries)), "mask").stats
    assert summarise(told, found).metrics["mask_ap"] == pytest.approx(stats[0], abs=1e-12)


def _one(box: list[float], label: int = 1, score: float = 0.9) -> Detections:
    x0, y0, x1, y1 = map(round, box)
    mask = np.zeros((SIZE[1], SIZE[0]), dtype=np.uint8, order="F")
    mask[y0:y1, x0:x1] = 1
    return Detections(
        np.array([box], dtype=np.float32),
        np.array([label]),
        np.array([score], dtype=np.float32),
        [rle_masks.encode(mask)],
    )


_NOTHING = Detections(
    np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros(0, np.float32), []
)


@pytest.fixture
def told(tmp_path: Path) -> CocoAnnotations:
    """Two images; a square in the first, with a crowd of discs; nothing in the second."""
    images = [
        {"id": n, "file_name": f"{n}.png", "width": SIZE[0], "height": SIZE[1]} for n in (1, 2)
    ]
    crowd = {"size": [SIZE[1], SIZE[0]], "counts": [0, 100 * SIZE[1], 100 * SIZE[1]]}
    objects = [
        # An evaluator that takes annotation 0 for "unmatched" would miss it.
        annotation(0, 1, 3, rectangle(120, 20, 40, 40)),
        annotation(1, 1, 7, rectangle(0, 0, 100, SIZE[1]), iscrowd=1, segmentation=crowd),
    ]
    return read_coco(write_file(tmp_path, "val", images, objects))


def test_a_class_without_an_object_does_not_count(told: CocoAnnotations) -> None:
    square = _one([120, 20, 160, 60])
    own = summarise(told, [(0, square), (1, _one([5, 5, 30, 30], label=2, score=0.99))])
    assert own.metrics["box_ap"] == own.metrics["mask_ap"] == 1.0
    assert own.metrics["box_ap_medium"] == 1.0
    assert "box_ap_small" not in own.metrics
    assert own.classes[0] | {"box_ap": 1.0, "objects": 1} == own.classes[0]
    assert own.classes[1]["objects"] == 0
    assert own.classes[1]["mask_ap"] is None
    assert np.isnan(own.curves["box"][:, 1]).all()


def test_what_is_found_in_a_crowd_is_not_wrong_and_elsewhere_it_is(told: CocoAnnotations) -> None:
    both = Detections(
        np.array([[10, 10, 30, 30], [120, 20, 160, 60]], dtype=np.float32),
        np.array([1, 1]),
        np.array([0.99, 0.5], dtype=np.float32),
        [*_one([10, 10, 30, 30]).masks, *_one([120, 20, 160, 60]).masks],
    )
    # The crowd is of discs: a square that is found there is wrong, and before the right one.
    assert summarise(told, [(0, both), (1, _NOTHING)]).metrics["box_ap"] == pytest.approx(0.5)
    discs = Detections(both.boxes, np.array([2, 1]), both.scores, both.masks)
    assert summarise(told, [(0, discs), (1, _NOTHING)]).metrics["box_ap"] == pytest.approx(1.0)


def test_nothing_found_is_zero_and_nothing_there_is_refused(told: CocoAnnotations) -> None:
    own = summarise(told, [(0, _NOTHING), (1, _NOTHING)])
    assert own.metrics["box_ap"] == own.metrics["mask_ap50"] == 0.0
    # What an image that is left out holds is not missed.
    assert summarise(told, [(0, _one([120, 20, 160, 60]))]).metrics["box_ap"] == 1.0
    with pytest.raises(DatasetError, match="that were tested have no object"):
        summarise(told, [(1, _NOTHING)])


def test_masks_are_encoded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    count, (width, height) = 130, SIZE
    corner = torch.rand(count, 2) * torch.tensor([width - 40.0, height - 40.0])
    output = {
        "boxes": torch.cat([corner, corner + 5 + torch.rand(count, 2) * 35], dim=1),
        "labels": torch.randint(1, 3, (count,)),
        "scores": torch.rand(count),
        "masks": torch.rand(count, 1, 28, 28),
    }
    seen = []

    def paste(masks: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(len(masks))
        return paste_masks_in_image(masks, *rest)

    monkeypatch.setattr(evaluation, "paste_masks_in_image", paste)
    monkeypatch.setattr(evaluation, "_CHUNK", 7 * width * height)
    own = detections(output, (height, width))
    assert max(seen) == 7
    assert sum(seen) == len(own.masks) == len(own.scores) == count
    order = output["scores"].argsort(descending=True)
    np.testing.assert_array_equal(own.boxes, output["boxes"][order].numpy())
    np.testing.assert_array_equal(own.labels, output["labels"][order].numpy())
    whole = paste_masks_in_image(output["masks"][order], output["boxes"][order], (height, width))
    for mask, expected in zip(own.masks, whole, strict=True):
        np.testing.assert_array_equal(rle_masks.decode(mask), (expected[0] > 0.5).numpy())
