"""Backbones of equal size on three sets of images, for equal epochs and for equal seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from sklearn.metrics import accuracy_score, mean_absolute_error, r2_score, roc_auc_score

from studies.lite0 import MODEL, WEIGHTS
from studies.sweeps import TITLES
from studies.sweeps.curves import curves_figure
from studies.sweeps.definition import Column, Panel, SameSeconds, Sweep, Variant

if TYPE_CHECKING:
    from vision_ttt.engine.train import TrainResult

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
    "conv-deit": {"model": "conv_deit_nano_patch4_32"},
}
_LARGER = (REFERENCE, "vit3", "deit", "conv-deit")
"""Those that are of equal size at other widths and patch sizes, too."""
_LABELS = {
    REFERENCE: "Vittt",
    "vit3": "ViT³",
    "vim": "Vim",
    "mambar": "Mamba-Reg",
    "deit": "DeiT",
    "conv-deit": "DeiT with Conv2d",
}
_COLUMNS = (
    Column("epochs", lambda result: result.epochs, 1),
    Column("training, s", lambda result: result.seconds, 0, is_time=True),
)


def _compare(
    models: Iterable[str], suffix: str = "", arguments: Mapping[str, Any] | None = None
) -> tuple[tuple[Variant, ...], dict[str, str], dict[str, str]]:
    """Rows of some models, each for the sweep's epochs and then for the seconds of the reference.

    Args:
        models: of `_NANO`.
        suffix: of the rows' names.
        arguments: of every model, beside its own.

    Returns:
        The rows, and label → row of equal epochs and of equal seconds.
    """
    epochs = {name: f"{name}{suffix}" for name in models}
    seconds = {name: row if name == REFERENCE else f"{row}-seconds" for name, row in epochs.items()}
    changes = {
        name: _NANO[name] | {"arguments": {**_NANO[name].get("arguments", {}), **(arguments or {})}}
        for name in epochs
    }
    rows = (
        *(Variant(row, changes[name]) for name, row in epochs.items()),
        *(
            Variant(row, changes[name], length=SameSeconds(epochs[REFERENCE]))
            for name, row in seconds.items()
            if name != REFERENCE
        ),
    )
    by_label = ({_LABELS[name]: row for name, row in each.items()} for each in (epochs, seconds))
    return (rows, *by_label)


_DIGITS, _EPOCHS, _SECONDS = _compare([name for name in _NANO if name != "conv-deit"])

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
    rows=_DIGITS,
    panels=(Panel("equal epochs", _EPOCHS), Panel("equal seconds", _SECONDS)),
    caveat="Small-scale evidence: 0.57 to 0.58 million parameters, 64 tokens, 1,297 training and "
    "500 test images, one recipe for all; seconds are those of one CPU thread. Differences below "
    "the spread over seeds mean nothing.",
    seeds=(0, 1, 2, 3, 4),
    columns=_COLUMNS,
    draw=curves_figure,
)

_COARSE, _COARSE_EPOCHS, _COARSE_SECONDS = _compare(_NANO)
_FINE, _FINE_EPOCHS, _FINE_SECONDS = _compare(_NANO, "-196", {"patch_size": 2})
_WIDE, _WIDE_EPOCHS, _WIDE_SECONDS = _compare(_LARGER, "-2m", {"embed_dim": 192})

BACKBONES_FASHION = Sweep(
    name="backbones-fashion",
    title=TITLES["backbones-fashion"],
    recipe="fashion-mnist",
    base={},
    rows=(*_COARSE, *_FINE, *_WIDE),
    panels=(
        Panel("49 tokens, equal epochs", _COARSE_EPOCHS),
        Panel("49 tokens, equal seconds", _COARSE_SECONDS),
        Panel("196 tokens, equal epochs", _FINE_EPOCHS),
        Panel("196 tokens, equal seconds", _FINE_SECONDS),
        Panel("49 tokens, 2.2 million parameters, equal epochs", _WIDE_EPOCHS),
        Panel("49 tokens, 2.2 million parameters, equal seconds", _WIDE_SECONDS),
    ),
    caveat="0.57 to 0.58 million parameters beside positions, 2.2 million in rows of twice the "
    "width (-2m); 60,000 training and 10,000 test images, one recipe for all; seconds are those "
    "of one CPU thread. Differences below the spread over seeds mean nothing.",
    columns=_COLUMNS,
    draw=curves_figure,
)


def measure_defects(trained: TrainResult) -> dict[str, Any]:
    """Return the measures of two classes of unequal size."""
    evaluation = trained.evaluation
    return {"balanced_accuracy": evaluation.balanced_accuracy, "roc_auc": evaluation.roc_auc}


_CELLS, _CELLS_EPOCHS, _CELLS_SECONDS = _compare(_LARGER, arguments={"patch_size": 8})
_FINE_CELLS, _FINE_CELLS_EPOCHS, _FINE_CELLS_SECONDS = _compare(
    (REFERENCE, "conv-deit"), "-5476", {"patch_size": 4}
)

_PRETRAINED = Variant(
    "lite0",
    {
        "model": MODEL,
        "initial_weights": str(WEIGHTS),
        "drop_path": 0.0,
        "epochs": 3,
        "warmup": 0.5,
        "learning_rate": 3e-4,
    },
    note=f"from ImageNet-1K: {WEIGHTS} by python -m studies.lite0",
)

BACKBONES_ELPV = Sweep(
    name="backbones-elpv",
    title=TITLES["backbones-elpv"],
    recipe="elpv",
    # A fifth of the recipe's epochs, in smaller batches for enough updates.
    base={"epochs": 12, "warmup": 1, "batch_size": 16},
    rows=(*_CELLS, *_FINE_CELLS, _PRETRAINED),
    panels=(
        Panel("1,369 tokens, equal seconds", _CELLS_SECONDS),
        Panel("1,369 tokens, equal epochs", _CELLS_EPOCHS),
        Panel("5,476 tokens, equal seconds", _FINE_CELLS_SECONDS),
        Panel("5,476 tokens, equal epochs", _FINE_CELLS_EPOCHS),
        Panel("fine-tuned", {"EfficientNet-Lite0": _PRETRAINED.name}),
    ),
    caveat="0.58 million parameters beside positions, EfficientNet-Lite0 3.4 million; 2,099 "
    "training and 525 test images, a split of its own for each seed, one recipe for all; seconds "
    "are those of one CPU thread. Differences below the spread over seeds mean nothing.",
    seeds=(0, 1, 2, 3, 4),
    seeded=("seed", "split_seed"),
    columns=(
        *_COLUMNS,
        Column("balanced, %", lambda result: 100 * result.measured["balanced_accuracy"], 1),
        Column("ROC-AUC", lambda result: result.measured["roc_auc"], 3),
    ),
    examine=measure_defects,
    draw=curves_figure,
)


_GRADES = torch.arange(4, dtype=torch.float64) / 3
"""The defect probabilities that are the classes of elpv-grades."""


def measure_probabilities(trained: TrainResult) -> dict[str, Any]:
    """Return how well the mean of the four grades estimates the probability of a defect."""
    evaluation = trained.evaluation
    estimated = evaluation.probabilities.double() @ _GRADES
    true = _GRADES[evaluation.targets]
    return {
        "mean_absolute_error": mean_absolute_error(true, estimated),
        "r2": r2_score(true, estimated),
        "defect_accuracy": accuracy_score(true >= 0.5, estimated >= 0.5),
        "defect_roc_auc": roc_auc_score(true >= 0.5, estimated),
    }


GRADES_ELPV = Sweep(
    name="grades-elpv",
    title=TITLES["grades-elpv"],
    recipe="elpv",
    # Smoothed labels would draw the estimates to one half.
    base={**BACKBONES_ELPV.base, "dataset": "elpv-grades", "label_smoothing": 0.0},
    rows=(_CELLS[0], _PRETRAINED),
    panels=(Panel("four grades", {"Vittt": REFERENCE, "EfficientNet-Lite0": _PRETRAINED.name}),),
    caveat="As backbones-elpv, with the four probabilities of a defect as classes and without "
    "label smoothing; the estimate is the mean of the four, weighted by the class probabilities.",
    seeds=BACKBONES_ELPV.seeds,
    seeded=BACKBONES_ELPV.seeded,
    columns=(
        *_COLUMNS,
        Column("mean absolute error", lambda result: result.measured["mean_absolute_error"], 3),
        Column("R²", lambda result: result.measured["r2"], 3),
        Column("defect, %", lambda result: 100 * result.measured["defect_accuracy"], 1),
        Column("ROC-AUC", lambda result: result.measured["defect_roc_auc"], 3),
    ),
    losses="train loss has augmentation",
    examine=measure_probabilities,
    draw=curves_figure,
)
