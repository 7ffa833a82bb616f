"""Backbones of equal size on handwritten digits, for equal epochs and for equal seconds."""

from __future__ import annotations

import functools
from typing import Any

from studies.sweeps import TITLES
from studies.sweeps.curves import curves_figure
from studies.sweeps.definition import Column, Panel, SameSeconds, Sweep, Variant

REFERENCE = "vittt"
"""The row whose seconds the others are given, too."""

_NANO: dict[str, dict[str, Any]] = {
    # 571,650 parameters with a head of ten classes; the others have 0.0 to 2.1 % more or less.
    REFERENCE: {"model": "vittt_nano_patch4_32"},
    "vit3": {"model": "vit3_nano_patch4_32"},
    # Composite ops save their memory and take longer.
    "vim": {"model": "vim_nano_patch4_32", "composite_ops": False},
    "mambar": {"model": "mambar_nano_patch4_32", "composite_ops": False},
    "deit": {
        "model": "deit_tiny_patch16_224",
        "arguments": {"patch_size": 4, "embed_dim": 96, "depth": 5, "num_heads": 3},
    },
}
_LABELS = {
    REFERENCE: "Vittt",
    "vit3": "ViT³",
    "vim": "Vim",
    "mambar": "Mamba-Reg",
    "deit": "DeiT",
}


def _same_seconds(name: str) -> str:
    """The row that trains a model for the seconds of the reference, which is its own."""
    return name if name == REFERENCE else f"{name}-seconds"


_ROWS = (
    *(Variant(name, _NANO[name]) for name in _NANO),
    *(
        Variant(_same_seconds(name), _NANO[name], length=SameSeconds(seconds=REFERENCE, speed=name))
        for name in _NANO
        if name != REFERENCE
    ),
)

BACKBONES_DIGITS = Sweep(
    name="backbones-digits",
    title=TITLES["backbones-digits"],
    recipe="digits",
    base={
        "image_size": 32,
        "epochs": 4,
        "warmup": 0.5,
        "batch_size": 16,
        "learning_rate": 1.5e-3,
    },
    rows=_ROWS,
    panels=(
        Panel("equal epochs", {label: name for name, label in _LABELS.items()}),
        Panel("equal seconds", {label: _same_seconds(name) for name, label in _LABELS.items()}),
    ),
    caveat="Small-scale evidence: 0.57 to 0.58 million parameters, 64 tokens, 1,297 training and "
    "500 test images, one recipe for all; seconds are those of one CPU thread. Differences below "
    "the spread over seeds mean nothing.",
    seeds=(0, 1, 2, 3, 4),
    columns=(
        Column("epochs", lambda result: result.epochs, 1),
        Column("training, s", lambda result: result.seconds, 0),
    ),
    draw=functools.partial(curves_figure, against=("epoch", "seconds")),
)
