"""A DeiT whose attention became inner models, on a dense task, and at four times the side."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from studies.stamps import RECIPE
from studies.stamps.dataset import StampImages
from studies.stamps.images import StampPictures
from studies.sweeps import TITLES
from studies.sweeps.definition import Column, Panel, Sweep, Variant
from studies.sweeps.extrapolation import mean_iou
from studies.sweeps.letters import backbone, rate_of
from studies.sweeps.linearize import (
    RELATIVE,
    TEACHER,
    UPDATE,
    examine,
    linear,
    linearize_figure,
    panels_by_share,
    rows_by_share,
)

if TYPE_CHECKING:
    from vision_ttt.engine.train import TrainResult

SIDE, LARGE = 256, 1024
"""Of the pictures of training, and of the last stage and the second test."""
SHARES = (10, 20)
"""In % of the DeiT's updates."""
UPDATES = 600
"""Of the DeiT, of four pictures each."""
LARGE_UPDATES = {"swiglu": 60, "deit": 6}
"""Of the last stage, of one picture each, in equal time: 1.9 and 20.6 CPU seconds an update."""
LARGE_IMAGES = 8

_DEIT = backbone("deit", SIDE)
_RATE = rate_of("deit", SIDE)
# As on Fashion-MNIST: a fifth of the DeiT's rate, and twice that rate for the inner models.
_TUNED = {"learning_rate": _RATE / 5}


def _picture_fields(side: int, batch_size: int, test_images: int) -> dict[str, Any]:
    return {
        "data.root_options": {"side": side, "test_images": test_images},
        "data.crop_size": side,
        "data.shorter_side": side,
        "data.test_shorter_side": side,
        "batch_size": batch_size,
    }


def _large(name: str, model: dict[str, Any]) -> Variant:
    """A model that starts from the DeiT's weights, trained on large pictures alone."""
    updates = LARGE_UPDATES[name]
    changes = {
        **model,
        **_picture_fields(LARGE, 1, LARGE_IMAGES),
        "learning_rate": _RATE / 10,  # one picture an update
        "updates": updates,
        "warmup": updates / 25,
        "evaluate_every": updates,
    }
    return Variant(f"{name}-large", changes, start=TEACHER)


def examine_large(trained: TrainResult) -> dict[str, Any]:
    """Return the mean IoU on large pictures, the CPU seconds of one, and those of an update."""
    own: StampImages = trained.task.parts["test"]
    settings = replace(own.pictures.settings, side=LARGE)
    pictures = StampImages(StampPictures(settings, "test"), LARGE_IMAGES)
    found = mean_iou(trained.model, trained.task, pictures, LARGE)
    image = torch.zeros(1, 3, LARGE, LARGE)
    seconds = []
    with torch.inference_mode():
        for _ in range(3):
            started = time.process_time()
            trained.model(image)
            seconds.append(time.process_time() - started)
    return {"at_large": found, "seconds_at_large": min(seconds), **examine(trained)}


_INNER = linear(_DEIT, "swiglu") | {"new_parameters_rate": 10}
LINEARIZE_STAMPS = Sweep(
    name="linearize-stamps",
    title=TITLES["linearize-stamps"],
    recipe=str(RECIPE),
    base={
        "num_workers": 0,
        **_picture_fields(SIDE, 4, 64),
        "learning_rate": _RATE,
        "updates": UPDATES,
        "warmup": UPDATES / 25,
        "evaluate_every": UPDATES // 2,
    },
    rows=(
        Variant(TEACHER, _DEIT),
        *rows_by_share(_DEIT, _TUNED, {}, SHARES),
        _large("swiglu", _INNER),
        _large("deit", _DEIT),
    ),
    panels=(
        *panels_by_share(SHARES),
        Panel(
            f"trained on {LARGE}² from the DeiT's weights",
            {"SwiGLU": "swiglu-large", "DeiT": "deit-large"},
        ),
    ),
    caveat=(
        "Small-scale evidence: 0.6 million parameters without positions, 118 cut-outs for training"
        " and 38 others for test; CPU time is that of updates on one thread, without making the"
        f" pictures. {LARGE}² is measured on {LARGE_IMAGES} pictures."
    ),
    columns=(
        *RELATIVE,
        Column(f"at {LARGE}², %", lambda result: 100 * result.measured["at_large"], 1),
        Column(
            f"CPU s of a picture of {LARGE}²",
            lambda result: result.measured["seconds_at_large"],
            2,
        ),
        UPDATE,
    ),
    accuracy="test_miou",
    losses="without label smoothing, per pixel",
    examine=examine_large,
    draw=linearize_figure,
)
