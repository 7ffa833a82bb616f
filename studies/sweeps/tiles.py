"""The comparison of whole pictures with tiles: models, training and tables.

The labels depend on a distant mark, which most tiles do not have, or on nothing distant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from studies.letters import RECIPE
from studies.spread import Spread
from studies.sweeps import TITLES
from studies.sweeps.definition import Column, Panel, Sweep, Variant
from studies.sweeps.letters import CHOSEN, LETTERS_SIZES, MARK, RESOLUTION_LETTERS
from studies.sweeps.results import Result
from studies.sweeps.tables import by_row
from studies.sweeps.tile_figure import tile_figure
from studies.sweeps.tile_ways import HALVES, OVERLAPPING, TILES, TIMES, WHOLE, measure_ways
from vision_ttt.bench.tables import Table

SIDE = 528
"""Of the pictures in the last stage. Letters stand in the cells of a grid: of 512² and 1024², tiles
of 256² would have their edges between letters, and cut none."""
TILE = SIDE // 2
BASE_UPDATES = {"vittt": 976, "deit": 716}
"""At 128² first."""
UPDATES = {"vittt": 200, "deit": 88}
"""Of the last stage. DeiT has the updates of equal time in both: by CPU seconds on a Xeon with AMX,
one takes 1.36 and 2.29 times as long as one of Vittt."""
MODELS = {"vittt": "Vittt", "deit": "DeiT with Conv2d"}
BASES = {
    "vittt": LETTERS_SIZES.by_name["vittt-128"],
    "deit": RESOLUTION_LETTERS.by_name["conv-deit-128"],
}
LABELS_BY = {"mark": "labels by the distant mark", "letter": "labels by the letter alone"}
TOLD = {
    WHOLE: "whole",
    HALVES: f"tiles of {SIDE}²",
    TILES: f"tiles of {TILE}²",
    OVERLAPPING: f"tiles of {TILE}², half overlapping",
}
"""Way → how it is told."""


def _base(model: str) -> Variant:
    own, updates = BASES[model], BASE_UPDATES[model]
    lengths = {"updates": updates, "warmup": updates / 25, "evaluate_every": updates}
    return Variant(f"{model}-128", {**own.changes, **lengths})


def _last_stage(model: str, labels_by: str, *, by_tiles: bool) -> Variant:
    """A base trained further, on whole pictures or on their tiles: as many tokens an update."""
    updates, batch_size = UPDATES[model], 4 if by_tiles else 1
    rate = CHOSEN["conv-deit" if model == "deit" else model]  # of four pictures an update
    changes: dict[str, Any] = {
        **BASES[model].changes,
        "data.root_options": {
            **{"side": SIDE, "mark": MARK, "test_images": 16},
            **({} if labels_by == "mark" else {"by_mark": False}),
        },
        "data.crop_size": TILE if by_tiles else SIDE,
        "data.shorter_side": SIDE,
        "data.test_shorter_side": SIDE,
        "batch_size": batch_size,
        "learning_rate": rate / 2 * math.sqrt(batch_size / 4),
        "updates": updates,
        "warmup": updates / 25,
        "evaluate_every": updates,
    }
    if by_tiles:
        changes |= {"data.evaluation": "slide", "data.window": TILE, "data.stride": TILE}
    name = f"{model}-{'tiles' if by_tiles else 'whole'}-{labels_by}"
    return Variant(name, changes, start=f"{model}-128")


def _panel(labels_by: str) -> Panel:
    rows = {f"{MODELS['vittt']}, trained on whole pictures": f"vittt-whole-{labels_by}"}
    for model, label in MODELS.items():
        rows[f"{label}, trained on tiles"] = f"{model}-tiles-{labels_by}"
    return Panel(f"training by {labels_by}", rows)


def tabulate_ways(sweep: Sweep, results: Sequence[Result]) -> list[Table]:
    """Return a table of the ways for each kind of labels.

    Raises:
        UserError: as for :func:`studies.sweeps.tables.by_row`.
    """
    found = by_row(sweep, results)
    headings = ["seen as", "mean IoU, %", "letters right, %", "seams", "CPU s", "memory, MiB"]
    tables = []
    for panel, title in zip(sweep.panels, LABELS_BY.values(), strict=False):
        lines = []
        for label, name in panel.rows.items():
            for way, told in TOLD.items():
                own = [each.measured["ways"].get(way) for each in found.get(name, ())]
                if own and own[0] is not None:
                    lines.append([label, told, *_cells(own), str(len(own))])
        tables.append(Table([title, *headings, "seeds"], lines))
    return tables


def _cells(own: Sequence[Mapping[str, Any]]) -> list[str]:
    def cell(value: Callable[[Mapping[str, Any]], float], decimals: int) -> str:
        return Spread.of([value(each) for each in own]).text(decimals)

    return [
        cell(lambda each: 100 * each["miou"], 1),
        cell(lambda each: 100 * each["right"], 1),
        cell(_seams, 1),
        cell(lambda each: each["seconds"], 2),
        cell(lambda each: math.nan if (b := each["memory_bytes"]) is None else b / 2**20, 0),
    ]


def _seams(own: Mapping[str, Any]) -> float:
    """How many times as often labels change along edges as elsewhere; NaN if nowhere else."""
    return own["at_edges"] / own["elsewhere"] if own["elsewhere"] else math.nan


LETTERS_TILES = Sweep(
    name="letters-tiles",
    title=TITLES["letters-tiles"],
    recipe=str(RECIPE),
    base={"num_workers": 0},
    rows=(
        *map(_base, MODELS),
        *(
            _last_stage(model, labels_by, by_tiles=by_tiles)
            for labels_by in LABELS_BY
            for model, by_tiles in (("vittt", False), ("vittt", True), ("deit", True))
        ),
    ),
    panels=(
        *map(_panel, LABELS_BY),
        Panel("before, on 128²", {label: f"{model}-128" for model, label in MODELS.items()}),
    ),
    caveat=(
        f"Tables of ways: four pictures of {TIMES * SIDE}² with about 400 letters each. Letters"
        " right: named if they count, else hidden. Seams: how often labels change that truly do"
        " not, along the edges of tiles (of a whole picture, where these would be), relative to"
        " all other places. CPU seconds are of one thread, a picture. Memory is the peak above"
        " model and picture; of tiles that overlap, the logits of all pixels are part of it."
        " Small-scale evidence: 0.6 million parameters, rendered pictures, one recipe."
    ),
    columns=(
        Column("training, s", lambda result: result.seconds, 0, is_time=True),
        Column("updates", lambda result: result.curve["update"][-1], 0),
    ),
    accuracy="test_miou",
    losses="without label smoothing, per pixel",
    examine=measure_ways,
    tables=tabulate_ways,
    draw=tile_figure,
)
