"""A DeiT whose attention became inner models, on a dense task, and at four times the side."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from studies.letters import RECIPE
from studies.sweeps import TITLES
from studies.sweeps.definition import Column, Panel, Sweep, Variant
from studies.sweeps.extrapolation import measure_larger
from studies.sweeps.letters import RATE_OF_LONG, RESOLUTION_LETTERS, rate_of
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

SIDE, TIMES = 128, 4
"""Side of the pictures of training, and how often that of the last stage and the second test."""
SHARES = (10, 20)
"""In % of the DeiT's updates."""
UPDATES = 4776
"""Of the DeiT: those of the row `deit-128-long` of `resolution-letters`."""
LARGE_UPDATES = {"swiglu": 200, "deit": 50}
"""Of the last stage, of one picture each, in about equal time."""
TIMED_SIDE = 1024

_DEIT_ROW = RESOLUTION_LETTERS.by_name["deit-128-long"].changes
_DEIT = {key: _DEIT_ROW[key] for key in ("model", "arguments")}
# As on Fashion-MNIST: a fifth of the DeiT's rate, and twice that rate for the inner models.
_TUNED = {"learning_rate": RATE_OF_LONG / 5}


def _large(name: str, model: dict[str, Any]) -> Variant:
    """A model that starts from the DeiT's weights, trained on large pictures alone."""
    updates, side = LARGE_UPDATES[name], TIMES * SIDE
    changes = {
        **model,
        "data.root_options": {"side": side, "test_images": 16, "mark": SIDE // 8},
        "data.crop_size": side,
        "data.shorter_side": side,
        "data.test_shorter_side": side,
        "batch_size": 1,
        "learning_rate": RATE_OF_LONG / 5,
        "updates": updates,
        "warmup": updates / 25,
        "evaluate_every": updates,
    }
    return Variant(f"{name}-large", changes, start=TEACHER)


def examine_large(trained: TrainResult) -> dict[str, Any]:
    """Return the mean IoU on larger pictures, the CPU seconds of one, and those of an update."""
    own = trained.task.parts["test"].settings.side
    larger = {} if own > SIDE else measure_larger(trained.model, trained.task, (TIMES,))
    model = trained.model.cpu()  # the seconds are a CPU's, wherever it was trained
    image = torch.zeros(1, 3, TIMED_SIDE, TIMED_SIDE)
    seconds = []
    with torch.inference_mode():
        for _ in range(3):
            started = time.process_time()
            model(image)
            seconds.append(time.process_time() - started)
    return {
        "on_larger": larger.get(str(TIMES), trained.metrics["test_miou"]),
        "seconds_of_a_picture": min(seconds),
        **examine(trained),
    }


_INNER = {**linear(_DEIT, "swiglu"), "new_parameters_rate": 10}
LINEARIZE_LETTERS = Sweep(
    name="linearize-letters",
    title=TITLES["linearize-letters"],
    recipe=str(RECIPE),
    base={
        **{key: value for key, value in _DEIT_ROW.items() if key not in _DEIT},
        "num_workers": 0,
        "updates": UPDATES,
        "warmup": UPDATES / 25,
        "evaluate_every": UPDATES // 2,
    },
    rows=(
        Variant(TEACHER, _DEIT),
        *rows_by_share(_DEIT, _TUNED, {"learning_rate": rate_of("vittt", SIDE)}, SHARES),
        _large("swiglu", _INNER),
        _large("deit", _DEIT),
    ),
    panels=(
        *panels_by_share(SHARES),
        Panel(
            f"trained on {TIMES * SIDE}² from the DeiT's weights",
            {"SwiGLU": "swiglu-large", "DeiT": "deit-large"},
        ),
    ),
    caveat=(
        "Small-scale evidence: 0.6 million parameters without positions, rendered pictures of"
        f" {SIDE}²; CPU time is that of updates on one thread, without making the pictures."
    ),
    columns=(
        *RELATIVE,
        Column(f"at {TIMES} × the side, %", lambda result: 100 * result.measured["on_larger"], 1),
        Column(
            f"CPU s of a picture of {TIMED_SIDE}²",
            lambda result: result.measured["seconds_of_a_picture"],
            2,
            is_time=True,
        ),
        UPDATE,
    ),
    accuracy="test_miou",
    losses="without label smoothing, per pixel",
    examine=examine_large,
    draw=linearize_figure,
)
