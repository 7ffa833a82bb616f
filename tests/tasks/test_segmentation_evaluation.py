"""Sliding windows, resized logits, and IoU against a plain confusion matrix."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import MulticlassJaccardIndex

from vision_ttt.data import DatasetError
from vision_ttt.data.mask_folders import IGNORED
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.parallel import make_accelerator
from vision_ttt.tasks.segmentation import logits as logits_module
from vision_ttt.tasks.segmentation.evaluation import (
    SegmentationEvaluation,
    measured,
)
from vision_ttt.tasks.segmentation.logits import (
    TestView,
    predicted_labels,
    resized_bands,
    sliding_logits,
    window_places,
)
from vision_ttt.tasks.segmentation.task import Segmentation

CLASSES = 5


def _per_pixel(images: Tensor) -> Tensor:
    """Logits that depend on a pixel alone: windows cannot change them."""
    weights = torch.linspace(-1, 1, CLASSES * 3).view(CLASSES, 3, 1, 1)
    return F.conv2d(images, weights)


class _PerPixel(torch.nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return _per_pixel(images)


def _blurred(images: Tensor) -> Tensor:
    """Logits that depend on the whole image."""
    return _per_pixel(images) + images.mean(dim=(1, 2, 3)).view(-1, 1, 1, 1)


@pytest.mark.parametrize(
    ("length", "expected"),
    [(5, [0]), (8, [0]), (9, [0, 1]), (14, [0, 6]), (15, [0, 6, 7]), (20, [0, 6, 12])],
)
def test_windows_cover_a_side_to_its_end(length: int, expected: list[int]) -> None:
    assert window_places(length, window=8, stride=6) == expected


def test_one_window_is_the_whole_image() -> None:
    image = torch.randn(3, 16, 16)
    slide = TestView("slide", 16, 10).segment(_blurred, CLASSES, "float32")(image)
    whole = TestView("whole", 16, 10).segment(_blurred, CLASSES, "float32")(image)
    torch.testing.assert_close(slide, whole)


@pytest.mark.parametrize("shape", [(16, 16), (33, 20), (9, 40), (5, 7)])
@pytest.mark.parametrize("at_once", [1, 3])
def test_windows_do_not_change_a_model_of_single_pixels(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], at_once: int
) -> None:
    monkeypatch.setattr(logits_module, "_MOST_IN_WINDOWS", at_once * CLASSES * 12**2)
    seen = []

    def model(images: Tensor) -> Tensor:
        seen.append(len(images))
        assert images.shape[1:] == (3, 12, 12)
        return _per_pixel(images)

    image = torch.randn(3, *shape)
    logits = sliding_logits(model, image, num_classes=CLASSES, window=12, stride=7)
    torch.testing.assert_close(logits, _per_pixel(image[None])[0])
    assert max(seen) <= at_once


def test_windows_are_averaged_where_they_overlap() -> None:
    numbers = iter(range(10))

    def model(images: Tensor) -> Tensor:
        levels = [next(numbers) for _ in images]
        return torch.tensor(levels).float().view(-1, 1, 1, 1).expand(-1, 2, 4, 4)

    logits = sliding_logits(model, torch.zeros(3, 4, 10), num_classes=2, window=4, stride=3)
    assert logits[0, 0].tolist() == [0, 0, 0, 0.5, 1, 1, 1.5, 2, 2, 2]
    with pytest.raises(ValueError, match="stride is 5; it must be from 1 to window"):
        sliding_logits(model, torch.zeros(3, 4, 4), num_classes=2, window=4, stride=5)


@pytest.mark.parametrize("size", [(7, 9), (16, 12), (40, 31), (3, 100)])
def test_bands_are_what_interpolate_returns(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    logits = torch.randn(CLASSES, 16, 12)
    whole = F.interpolate(logits[None], size, mode="bilinear", align_corners=False)[0]
    for most in (1, 3 * CLASSES * max(size[1], 12), 2**24):
        monkeypatch.setattr(logits_module, "_MOST_IN_BAND", most)
        bands = list(resized_bands(logits, size))
        assert [rows.start for rows, _ in bands] == [
            0,
            *(rows.stop for rows, _ in bands[:-1]),
        ]
        torch.testing.assert_close(torch.cat([band for _, band in bands], dim=1), whole)
    assert torch.equal(predicted_labels(logits, size), whole.argmax(dim=0))
    logits[0, 3, 3] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        predicted_labels(logits, size)


def _batches(sizes: list[tuple[int, int]], labels_below: int) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for number, (height, width) in enumerate(sizes):
        labels = torch.randint(labels_below, (height, width), generator=generator)
        labels[torch.rand(height, width, generator=generator) < 0.2] = IGNORED
        batches.append(
            {
                "images": [torch.randn(3, height // 2 + 3, width, generator=generator)],
                "labels": [labels.to(torch.uint8)],
                "indices": torch.tensor([number]),
                "damaged": [],
            }
        )
    return batches


def _evaluate(batches: list[dict], classes: int = CLASSES) -> SegmentationEvaluation:
    task = Segmentation.__new__(Segmentation)  # without data: these are the batches
    task.classes, task.precision = ("",) * classes, "float32"
    task.view, task._warned = TestView("whole", 1, 1), True
    return task.evaluate(
        _PerPixel(),
        batches,
        make_accelerator(),
        damaged=DamagedItems(skip=True),
        between=lambda: None,
    )


def test_figures_are_those_of_a_confusion_matrix_and_of_torchmetrics() -> None:
    batches = _batches([(12, 10), (9, 14), (20, 8), (5, 5)], CLASSES - 1)
    found = _evaluate(batches)
    confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    jaccard = MulticlassJaccardIndex(CLASSES, ignore_index=IGNORED)
    loss, pixels = 0.0, 0
    for batch in batches:
        (image,), (labels,) = batch["images"], batch["labels"]
        logits = F.interpolate(_per_pixel(image[None]), labels.shape, mode="bilinear")
        predicted = logits[0].argmax(dim=0)
        labels = labels.long()
        for true, other in zip(labels.flatten(), predicted.flatten(), strict=True):
            if true != IGNORED:
                confusion[true, other] += 1
        jaccard.update(predicted[None], labels[None])
        loss += F.cross_entropy(logits, labels[None], ignore_index=IGNORED, reduction="sum").item()
        pixels += int((labels != IGNORED).sum())
    diagonal, true, other = confusion.diagonal(), confusion.sum(dim=1), confusion.sum(dim=0)
    assert found.intersections.tolist() == diagonal.tolist()
    assert found.true.tolist() == true.tolist()
    assert found.predicted.tolist() == other.tolist()
    assert true[-1] == 0  # only ever predicted: its IoU is 0 and counts
    assert other[-1] > 0
    assert found.iou.tolist() == (diagonal / (true + other - diagonal).double()).tolist()
    assert found.metrics["miou"] == pytest.approx(jaccard.compute().item(), abs=1e-6)
    assert found.metrics["mean_accuracy"] == pytest.approx(
        (diagonal[:-1] / true[:-1].double()).mean().item()
    )
    assert found.metrics["pixel_accuracy"] == pytest.approx(diagonal.sum().item() / pixels)
    assert found.loss == pytest.approx(loss / pixels, rel=1e-5)
    assert found.images == 4


def test_classes_that_do_not_occur_are_left_out_of_the_mean() -> None:
    labels = torch.tensor([[0, 0, 1, IGNORED]], dtype=torch.uint8)
    logits = torch.zeros(4, 1, 4)
    logits[0, 0, 0] = logits[1, 0, 1] = logits[1, 0, 2] = logits[3, 0, 3] = 9.0
    counts, _ = measured(logits, labels)
    found = SegmentationEvaluation(*counts, loss=1.0, images=1)
    assert found.iou[:2].tolist() == [0.5, 0.5]
    assert found.iou[2:].isnan().all()
    assert found.metrics["miou"] == 0.5
    assert found.metrics["mean_accuracy"] == 0.75
    assert found.metrics["pixel_accuracy"] == pytest.approx(2 / 3)


def test_an_image_counts_once_and_none_without_a_class_is_refused() -> None:
    batches = _batches([(6, 6), (8, 8)], CLASSES)
    once = _evaluate(batches)
    empty = {"images": [], "labels": [], "indices": torch.zeros(0, dtype=torch.int64)}
    again = _evaluate([*batches, {**empty, "damaged": []}, batches[0]])
    assert again.true.tolist() == once.true.tolist()
    assert math.isclose(again.loss, once.loss)
    for batch in batches:
        batch["labels"][0].fill_(IGNORED)
    with pytest.raises(DatasetError, match="no pixel of the 2 test images has a class"):
        _evaluate(batches)
