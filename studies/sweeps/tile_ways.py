"""A segmenter of letters on large pictures, as a whole and by tiles of several kinds."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from studies.letters.dataset import LetterImages
from studies.letters.images import BACKGROUND, LetterPicture, fill_outline
from studies.sweeps.extrapolation import balanced
from studies.sweeps.label_pictures import packed
from vision_ttt import tasks
from vision_ttt.acceleration import for_inference
from vision_ttt.bench.memory import memory_in_processes
from vision_ttt.data import SeededItems
from vision_ttt.engine.checkpoint import WEIGHTS_FILE
from vision_ttt.tasks.segmentation.evaluation import SegmentationEvaluation
from vision_ttt.tasks.segmentation.logits import sliding_logits
from vision_ttt.tasks.segmentation.transforms import TestTransform
from vision_ttt.whole import WholePictures

if TYPE_CHECKING:
    from vision_ttt.engine.train import TrainResult

WHOLE, HALVES, TILES, OVERLAPPING = "whole", "halves", "tiles", "overlapping"
"""Ways: as a whole; in tiles of half of the picture's side; in tiles of a quarter of it, next to
each other or each half over the next."""
TIMES = 2
"""Sides of the picture, in sides of those that the model was trained on, whole or by tiles."""
PICTURES = 4
"""One with the mark in each corner."""
SHRUNK = 4
"""Pixels along the side of a pixel of the labels that are kept to be shown."""

_CPU = torch.device("cpu")


class Tiles(NamedTuple):
    """Square windows, in pixels."""

    window: int
    stride: int


def tiles_of(way: str, side: int) -> Tiles | None:
    """Return the tiles of a way on a picture of a side; None where it is seen as a whole."""
    return {
        WHOLE: None,
        HALVES: Tiles(side // 2, side // 2),
        TILES: Tiles(side // 4, side // 4),
        OVERLAPPING: Tiles(side // 4, side // 8),
    }[way]


def measure_ways(trained: TrainResult) -> dict[str, Any]:
    """Return what a segmenter of letters does on pictures of `TIMES` the side, by each way.

    A run that starts from no weights is there for others to start from, and measures nothing. DeiT
    is not run on whole pictures.

    Returns:
        "picture", the number of the first test picture, and "ways": for each "miou"; "right", the
        share of letters that are named if they count and else hidden; "at_edges" and "elsewhere",
        as of :func:`seams`; "seconds", the CPU time of a picture, median; "memory_bytes", at the
        peak above the model and the picture, None where it cannot be measured; "labels" of the
        first picture, smaller, a PNG in base64, where the mark says what counts.
    """
    if trained.config.model.initial_weights is None:
        return {}
    own: LetterImages = trained.task.parts["test"]
    side = TIMES * own.settings.side
    pictures = balanced(replace(own, settings=replace(own.settings, side=side)), PICTURES)
    items = SeededItems(pictures, TestTransform(trained.task.statistics, side, side))
    seen = [
        (items[place].image, items[place].labels.numpy(), pictures.dataset.picture(index))
        for place, index in enumerate(pictures.indices)
    ]
    found = {}
    for way in (WHOLE, HALVES, TILES, OVERLAPPING):
        if way == WHOLE and trained.config.model.name.startswith("conv_deit"):
            continue
        tiles = tiles_of(way, side)
        segment = labeller(trained.model, tiles)
        segment(seen[0][0])  # the first call allocates
        labels, seconds = [], []
        for image, _, _ in seen:
            start = time.process_time()
            labels.append(segment(image))
            seconds.append(time.process_time() - start)
        build = partial(_prepare, str(trained.run_dir / WEIGHTS_FILE), tiles, side)
        memory, _ = memory_in_processes(build, _CPU, runs=3)
        step = side // 4 if tiles is None else tiles.stride
        edges = [seams(shown, true, step) for shown, (_, true, _) in zip(labels, seen, strict=True)]
        at_edges, elsewhere = np.mean(edges, axis=0).tolist()
        found[way] = {
            "miou": _miou(labels, [true for _, true, _ in seen], len(trained.task.classes)),
            "right": np.concatenate(
                [letters_right(shown, each) for shown, (*_, each) in zip(labels, seen, strict=True)]
            ).mean(),
            "at_edges": at_edges,
            "elsewhere": elsewhere,
            "seconds": median(seconds),
            "memory_bytes": memory.peak,
        }
        if own.settings.by_mark:
            found[way]["labels"] = packed(labels[0][::SHRUNK, ::SHRUNK], trained.task.classes)
    return {"picture": pictures.indices[0], "ways": found}


def labeller(model: nn.Module, tiles: Tiles | None) -> Callable[[Tensor], np.ndarray]:
    """Return what makes a normalised image [3, H, W] into its labels [H, W] uint8.

    Tiles, of which a picture has whole numbers, go through the model one by one. Where they overlap
    the mean of their logits decides, for which those of all pixels are kept.
    """
    if tiles is None:
        whole = WholePictures(model)
        return lambda image: torch.cat([rows for _, rows in whole.labels(image)]).numpy()
    with warnings.catch_warnings():  # of DeiT's blocks only the linear layers are packed
        warnings.simplefilter("ignore", RuntimeWarning)
        fast = for_inference(model)
    classes = model.num_classes

    @torch.inference_mode()
    def side_by_side(image: Tensor) -> np.ndarray:
        labels = np.empty(image.shape[1:], np.uint8)
        for top, left in product(*(range(0, length, tiles.window) for length in labels.shape)):
            tile = (slice(top, top + tiles.window), slice(left, left + tiles.window))
            labels[tile] = fast(image[(None, slice(None), *tile)])[0].argmax(dim=0).numpy()
        return labels

    @torch.inference_mode()
    def overlapping(image: Tensor) -> np.ndarray:
        logits = sliding_logits(
            lambda windows: (fast(each[None])[0] for each in windows),  # the memory of one tile
            *(image,),
            num_classes=classes,
            window=tiles.window,
            stride=tiles.stride,
        )
        return logits.argmax(dim=0).to(torch.uint8).numpy()

    return side_by_side if tiles.stride == tiles.window else overlapping


def _prepare(
    weights: str, tiles: Tiles | None, side: int
) -> Callable[[], Callable[[], np.ndarray]]:
    model, _ = tasks.load_model(weights, task="segmentation")
    segment = labeller(model, tiles)
    image = torch.randn(3, side, side)
    return lambda: partial(segment, image)


def seams(shown: np.ndarray, true: np.ndarray, step: int) -> tuple[float, float]:
    """Return how often neighbours' labels differ that are truly one, at edges and elsewhere.

    Args:
        shown, true: labels [H, W].
        step: pixels from edge to edge, in rows and in columns.

    Returns:
        The share of pairs of pixels across an edge whose labels differ where the true ones do not,
        and that of all other neighbours.
    """
    shares = []
    for own, other in ((shown, true), (shown.T, true.T)):
        wrong = ((np.diff(own, axis=1) != 0) & (np.diff(other, axis=1) == 0)).mean(axis=0)
        is_edge = np.arange(1, own.shape[1]) % step == 0
        shares.append((wrong[is_edge].mean(), wrong[~is_edge].mean()))
    at_edges, elsewhere = np.mean(shares, axis=0).tolist()
    return at_edges, elsewhere


def letters_right(shown: np.ndarray, picture: LetterPicture) -> np.ndarray:
    """Return of each letter whether most pixels of its hull say what they should, bool.

    That is its class if it counts, and the background if it does not.
    """
    canvas = Image.new("I", picture.image.size)
    for number, letter in enumerate(picture.letters, start=1):
        fill_outline(canvas, letter, number)
    hulls = np.asarray(canvas)
    wanted = [letter.label + 1 if letter.counts else BACKGROUND for letter in picture.letters]
    agrees = shown == np.array([BACKGROUND, *wanted])[hulls]
    return (np.bincount(hulls.ravel(), agrees.ravel()) / np.bincount(hulls.ravel()))[1:] > 0.5


def _miou(shown: list[np.ndarray], true: list[np.ndarray], classes: int) -> float:
    pairs = classes * np.stack(true).astype(np.int64) + np.stack(shown)
    table = np.bincount(pairs.ravel(), minlength=classes**2).reshape(classes, classes)
    counts = (np.diagonal(table), table.sum(axis=0), table.sum(axis=1))
    own = (torch.from_numpy(each.copy()) for each in counts)
    return SegmentationEvaluation(*own, float("nan"), len(shown)).metrics["miou"]
