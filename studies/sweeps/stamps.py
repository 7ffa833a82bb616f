"""Backbones at equal time on real pixels: cut-outs on photographs, at 512² and 1024²."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from studies.stamps import RECIPE
from studies.sweeps import TITLES
from studies.sweeps.definition import Column, GivenSeconds, Panel, Sweep, Variant
from studies.sweeps.letters import COMPARED, LABELS, backbone, rate_of

if TYPE_CHECKING:
    from vision_ttt.engine.train import TrainResult

SECONDS = 360
"""Of training, on one thread."""
TEST_IMAGES = {512: 64, 1024: 16}
"""Side of the pictures → how many are tested: as many cut-outs at each."""


def _row(model: str, side: int) -> Variant:
    """A model for the given seconds, at the learning rate chosen on letters."""
    changes: dict[str, Any] = {
        **backbone(model, side),
        "data.root_options": {"side": side, "test_images": TEST_IMAGES[side]},
        "data.crop_size": side,
        "data.shorter_side": side,
        "data.test_shorter_side": side,
        "learning_rate": rate_of(model, side),
        # The seconds set the number of updates, and scale these.
        "updates": 1000,
        "warmup": 40,
        "evaluate_every": 500,
    }
    return Variant(f"{model}-{side}", changes, length=GivenSeconds(SECONDS))


def examine_stamps(trained: TrainResult) -> dict[str, Any]:
    """Return the peak of memory."""
    history = trained.metrics["history"]
    return {"memory_bytes": max(row["memory_bytes"] for row in history)}


STAMPS = Sweep(
    name="stamps",
    title=TITLES["stamps"],
    recipe=str(RECIPE),
    base={"num_workers": 0},
    rows=tuple(_row(model, side) for side in TEST_IMAGES for model in COMPARED),
    panels=tuple(
        Panel(f"{side}², equal time", {LABELS[model]: f"{model}-{side}" for model in COMPARED})
        for side in TEST_IMAGES
    ),
    caveat=(
        "Small-scale evidence: 0.58 to 0.59 million parameters without positions, trained from"
        " scratch for six minutes of one thread with 118 cut-outs of eight classes; tested on 38"
        " others, and on three photographs that training has not. Learning rates are those chosen"
        " on letters."
    ),
    columns=(
        Column("updates", lambda result: result.curve["update"][-1], 0),
        Column("training, s", lambda result: result.seconds, 0),
        Column("memory, GiB", lambda result: result.measured["memory_bytes"] / 2**30, 2),
    ),
    accuracy="test_miou",
    losses="without label smoothing, per pixel",
    examine=examine_stamps,
)
