"""What linear cost buys: backbones on pictures of letters, by resolution, at equal time and images.

Vittt, ViT³, Vim, Mamba-Reg and DeiT of equal size name the letter under every token, by a linear
layer. `letters-rates` chooses each one's learning rate on a validation split, `resolution-letters`
compares them. `letters-sizes` is about Vittt on pictures larger than those of its training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from studies.letters import RECIPE
from studies.sweeps import TITLES
from studies.sweeps.definition import Column, GivenSeconds, Panel, Sweep, Variant
from studies.sweeps.extrapolation import FACTORS, measure_larger
from studies.sweeps.letter_figure import letter_figure
from studies.sweeps.mark import measure_mark

if TYPE_CHECKING:
    from studies.sweeps.results import Result
    from vision_ttt.engine.train import TrainResult

PATCH = 8
SIDES = (512, 256, 128, 1024)
"""Of the pictures; the first one is what the evidence rests on, and trained first."""
SECONDS = 180
"""Of training in the rows of equal time, on one thread; at the first size also twice as many."""
TOKENS = 4096
"""Of an update, in pictures of whatever size; a picture of 1024² pixels has more."""
IMAGES = {512: 240, 256: 2048, 128: 8192}
"""Side → pictures seen in the rows of equal images; at 1024² there are none."""
TEST_IMAGES = {1024: 4, 512: 16, 256: 64, 128: 256}
"""Side → test pictures: as many letters at each."""
RATES = (1e-3, 2.5e-3, 6e-3)
"""Learning rates that are tried."""
SIDE_OF_RATES, SECONDS_OF_RATES = 256, 120
"""Pictures' side and seconds in the runs that choose: at 512² DeiT would learn nothing by then."""
SIDE_OF_MORE_RATES = 128
"""Pictures' side in further runs of DeiT: the rate chosen at another size may not be its best."""
RATE_OF_LONG, TIMES_OF_LONG = 1e-3, 8
"""Learning rate, of least test loss, and length of one more run of DeiT at that size."""
EVALUATIONS = 5
"""Of each run that is compared; those that choose a rate have one."""
SEED_OF_RATES = 100
"""Of the runs that choose learning rates, and of no other."""

_NANO: dict[str, dict[str, Any]] = {
    # 579,427 parameters without positions; the others have -0.1 to 1.6 % more.
    "vittt": {"model": "vittt_nano_patch4_32"},
    "vit3": {"model": "vit3_nano_patch4_32"},
    # Composite ops save their memory and take longer.
    "vim": {"model": "vim_nano_patch4_32", "composite_ops": False},
    "mambar": {"model": "mambar_nano_patch4_32", "composite_ops": False},
    "deit": {
        "model": "deit_tiny_patch16_224",
        "arguments": {"embed_dim": 96, "depth": 5, "num_heads": 3},
    },
    "conv-deit": {"model": "conv_deit_nano_patch4_32"},
    "vittt-one-way": {
        "model": "vittt_nano_patch4_32",
        "arguments": {"design": "one_way"},
    },
    "vittt-no-conv2d": {
        "model": "vittt_nano_patch4_32",
        "arguments": {"design": "dual"},
    },
}
LABELS = {
    "vittt": "Vittt",
    "vit3": "ViT³",
    "vim": "Vim",
    "mambar": "Mamba-Reg",
    "deit": "DeiT",
    "conv-deit": "DeiT with Conv2d",
    "vittt-one-way": "Vittt, one direction",
    "vittt-no-conv2d": "Vittt without Conv2d",
}
COMPARED = tuple(name for name in LABELS if not name.startswith("vittt-"))
"""Models of every panel; the others are Vittt without one of its parts, at 512² alone."""

CHOSEN = {
    "vittt": 2.5e-3,
    "vit3": 6e-3,
    "vim": 2.5e-3,
    "mambar": 6e-3,
    "deit": 6e-3,
    "conv-deit": 6e-3,
}
"""Model → the learning rate of least test loss in `letters-rates`."""


def backbone(model: str, side: int) -> dict[str, Any]:
    """Fields of a run that name a model of `LABELS`, for pictures of a size."""
    own = _NANO[model]
    arguments = {"patch_size": PATCH, "img_size": side, **own.get("arguments", {})}
    return {**own, "arguments": arguments}


def _row(
    name: str,
    model: str,
    side: int,
    rate: float,
    *,
    updates: int = 1000,
    evaluations: int = EVALUATIONS,
    length: GivenSeconds | None = None,
) -> Variant:
    """A model on pictures of a size, for so many updates or the given seconds."""
    batch_size = _batch_size(side)
    changes: dict[str, Any] = {
        **backbone(model, side),
        "data.root_options": {"side": side, "test_images": TEST_IMAGES[side]},
        "data.crop_size": side,
        "data.shorter_side": side,
        "data.test_shorter_side": side,
        "batch_size": batch_size,
        "learning_rate": rate,
        "updates": updates,
        "warmup": updates / 25,
        "evaluate_every": -(-updates // evaluations),
    }
    return Variant(name, changes, length=length)


def _rate_rows() -> tuple[Variant, ...]:
    return tuple(
        _row(
            f"{model}-{rate:g}",
            model,
            SIDE_OF_RATES,
            rate,
            evaluations=1,
            length=GivenSeconds(SECONDS_OF_RATES),
        )
        for model in COMPARED
        for rate in RATES
    )


def _same_time(model: str, side: int) -> Variant:
    return _row(f"{model}-{side}", model, side, rate_of(model, side), length=GivenSeconds(SECONDS))


def _another_rate(model: str, rate: float) -> Variant:
    name, side = f"{model}-{SIDE_OF_MORE_RATES}-{rate:g}", SIDE_OF_MORE_RATES
    return _row(name, model, side, rate, length=GivenSeconds(SECONDS))


def _long(model: str) -> Variant:
    name, length = f"{model}-{SIDE_OF_MORE_RATES}-long", GivenSeconds(TIMES_OF_LONG * SECONDS)
    return _row(name, model, SIDE_OF_MORE_RATES, RATE_OF_LONG, length=length)


def _twice_the_time(model: str, side: int) -> Variant:
    length = GivenSeconds(2 * SECONDS)
    return _row(f"{model}-{side}-twice", model, side, rate_of(model, side), length=length)


def _same_images(model: str, side: int) -> Variant:
    updates = IMAGES[side] // _batch_size(side)
    return _row(f"{model}-{side}-images", model, side, rate_of(model, side), updates=updates)


def _batch_size(side: int) -> int:
    """Pictures of an update."""
    return max(TOKENS * PATCH**2 // side**2, 1)


def rate_of(model: str, side: int) -> float:
    """The learning rate that was chosen, by the square root of the batch's pictures.

    Variants of Vittt have Vittt's.

    On single pictures of 512² Vittt learnt the mark with 1.5e-3 and not with 2.5e-3, which is the
    best of three in batches of four.
    """
    chosen = CHOSEN["vittt" if model.startswith("vittt") else model]
    return chosen * math.sqrt(_batch_size(side) / _batch_size(SIDE_OF_RATES))


def examine(trained: TrainResult) -> dict[str, Any]:
    """Return what else is measured: memory, obedience to the mark, larger pictures."""
    history = trained.metrics["history"]
    return {
        "memory_bytes": max(row["memory_bytes"] for row in history),
        "images": [row["update"] * trained.config.optimisation.batch_size for row in history],
        **measure_mark(trained.model, trained.task),
        "on_larger": measure_larger(trained.model, trained.task),
    }


def _gibibytes(result: Result) -> float:
    return result.measured["memory_bytes"] / 2**30


def _images(result: Result) -> float:
    return result.measured["images"][-1]


def _obeyed(result: Result) -> float:
    return 100 * result.measured["obeyed"]


def _larger(factor: int) -> Column:
    """The mean IoU on pictures of `factor` times the side.

    The first runs have "larger" instead: of one to four pictures, most marks in one corner.
    """
    return Column(
        f"at {factor} × the side, %",
        lambda result: 100 * result.measured.get("on_larger", {}).get(str(factor), math.nan),
        1,
    )


_CAVEAT = (
    "Small-scale evidence: 0.58 to 0.59 million parameters without positions (0.49 of one "
    "direction alone), rendered pictures, one recipe but for the learning rate, one thread a run."
)
_COLUMNS = (
    *map(_larger, FACTORS),
    Column("correct by the mark, %", _obeyed, 1),
    Column("images seen", _images, 0),
    Column("memory, GiB", _gibibytes, 2),
)
_COMMON: Mapping[str, Any] = {
    "recipe": str(RECIPE),
    "caveat": _CAVEAT,
    "columns": _COLUMNS,
    "accuracy": "test_miou",
    "losses": "without label smoothing, per pixel",
    "examine": examine,
    "draw": letter_figure,
}

LETTERS_RATES = Sweep(
    name="letters-rates",
    title=TITLES["letters-rates"],
    base={"data.root_options": {"test_split": "validation"}},
    rows=_rate_rows(),
    panels=tuple(
        Panel(LABELS[model], {f"{rate:g}": f"{model}-{rate:g}" for rate in RATES})
        for model in COMPARED
    ),
    seeds=(SEED_OF_RATES,),
    **_COMMON,
)

RESOLUTION_LETTERS = Sweep(
    name="resolution-letters",
    title=TITLES["resolution-letters"],
    base={"num_workers": 0},
    rows=tuple(
        [_same_time(model, SIDES[0]) for model in LABELS]
        + [_twice_the_time(model, SIDES[0]) for model in LABELS]
        + [_same_time(model, side) for side in SIDES[1:] for model in COMPARED]
        + [_same_images(model, side) for side in IMAGES for model in COMPARED]
        + [_another_rate("deit", rate) for rate in RATES]
        + [_long("deit")]
    ),
    panels=(
        *(
            Panel(f"{side}², equal time", {LABELS[model]: f"{model}-{side}" for model in COMPARED})
            for side in SIDES
        ),
        Panel(
            f"{SIDES[0]}², twice the time",
            {LABELS[model]: f"{model}-{SIDES[0]}-twice" for model in COMPARED},
        ),
        *(
            Panel(
                f"{SIDES[0]}², Vittt without a part{told}",
                {
                    label: f"{model}-{SIDES[0]}{suffix}"
                    for model, label in LABELS.items()
                    if model.startswith("vittt")
                },
            )
            for suffix, told in (("", ""), ("-twice", ", twice the time"))
        ),
        *(
            Panel(
                f"{side}², equal images",
                {LABELS[model]: f"{model}-{side}-images" for model in COMPARED},
            )
            for side in IMAGES
        ),
        Panel(
            f"{SIDE_OF_MORE_RATES}², DeiT by learning rate",
            {
                f"{rate_of('deit', SIDE_OF_MORE_RATES):g}": f"deit-{SIDE_OF_MORE_RATES}",
                **{f"{rate:g}": f"deit-{SIDE_OF_MORE_RATES}-{rate:g}" for rate in RATES},
                f"{RATE_OF_LONG:g}, {TIMES_OF_LONG} times as long": (
                    f"deit-{SIDE_OF_MORE_RATES}-long"
                ),
            },
        ),
    ),
    **_COMMON,
)

SIDE_BEFORE, UPDATES_BEFORE = 128, 976
"""Pictures' side and updates of the runs that are continued on larger pictures; 976 took about 180
seconds in the rows of equal time."""
MARK = 16
"""Pixels along the mark's side in those runs, at every size: what it is at the first one."""
LARGE = (1024, 2048)
"""Sides that they are tested on, as well as on their own."""


def _continued(side: int, updates: int) -> Variant:
    row = _row(f"vittt-to-{side}", "vittt", side, rate_of("vittt", side) / 2, updates=updates)
    changes = {
        **row.changes,
        "arguments": {**row.changes["arguments"], "img_size": SIDE_BEFORE},
        "data.root_options": {**row.changes["data.root_options"], "mark": MARK},
    }
    return replace(row, changes=changes, start="vittt-128")


def examine_large(trained: TrainResult) -> dict[str, Any]:
    """Return the mean IoU on pictures of `LARGE`, by side."""
    own = trained.task.parts["test"].settings.side
    found = measure_larger(trained.model, trained.task, [side // own for side in LARGE])
    return {str(own * int(factor)): miou for factor, miou in found.items()}


def _at(side: int) -> Column:
    return Column(f"at {side}², %", lambda result: 100 * result.measured[str(side)], 1)


LETTERS_SIZES = Sweep(
    name="letters-sizes",
    title=TITLES["letters-sizes"],
    base={"num_workers": 0},
    rows=(
        _row("vittt-128", "vittt", SIDE_BEFORE, rate_of("vittt", 128), updates=UPDATES_BEFORE),
        *(_continued(side, 200) for side in (256, 512)),
    ),
    panels=(
        Panel(
            "Vittt",
            {
                "128² alone": "vittt-128",
                "then 200 updates at 256²": "vittt-to-256",
                "then 200 updates at 512²": "vittt-to-512",
            },
            in_steps=True,
        ),
    ),
    **{**_COMMON, "columns": tuple(map(_at, LARGE)), "examine": examine_large, "draw": None},
)
