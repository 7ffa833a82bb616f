"""Whole ranges of factors of inner training: rate, tokens per step, epochs, size of the model.

One factor varies at a time, from the centres of the sweep `design-space-digits`, or from its rows
of a model with a hidden layer. The state of an inner model of one layer grows with the width of a
head, that is with fewer heads; that of the others with the width of the hidden layer.
"""

from __future__ import annotations

from typing import NamedTuple

from studies.models.design_space import MLP_RATIOS
from studies.sweeps import TITLES
from studies.sweeps.definition import Panel, Sweep, Variant
from studies.sweeps.design_space import CENTRES, DESIGN_SPACE_DIGITS, inner_row


class Factor(NamedTuple):
    """What varies along a line of rows."""

    title: str
    argument: str
    """Of the model."""
    mark: str
    """Before the value in a row's name."""
    values: tuple[float, ...]
    central: float
    """The value of the row from which the line goes out."""


FACTORS = (
    Factor("learning rate", "inner_learning_rate", "rate", (0.1, 0.2, 0.5, 1, 2, 5, 10), 1),
    # 64 are all tokens of an image.
    Factor("tokens per step", "inner_mini_batch_size", "b", (4, 8, 16, 32, 64), 64),
    Factor("inner epochs", "inner_epochs", "epochs", (1, 2, 3, 4), 1),
    # Of 64 channels: heads of width 8 to 64.
    Factor("heads", "num_heads", "heads", (8, 4, 2, 1), 2),
)

RATIOS = (1, 2, 4, 8)
_LAYERED = tuple((model, "dot_product") for model in MLP_RATIOS)


def _rows(central: Variant, factor: Factor) -> dict[str, Variant]:
    """Label in a panel → row."""
    rows = {}
    for value in factor.values:
        arguments = {**central.changes["arguments"], factor.argument: value}
        row = Variant(f"{central.name}-{factor.mark}{value:g}", {"arguments": arguments})
        rows[f"{value:g}"] = central if value == factor.central else row
    return rows


def _lines() -> dict[str, dict[str, Variant]]:
    """Title of each panel → its rows; a central row stands in each panel of its own."""
    widths = {
        model: Factor("hidden width over a head's", "inner_mlp_ratio", "ratio", RATIOS, ratio)
        for model, ratio in MLP_RATIOS.items()
    }
    lines = {}
    for pair in (*CENTRES, *_LAYERED):
        central = inner_row(*pair)
        for factor in FACTORS if pair in CENTRES else (widths[pair[0]],):
            lines[f"{factor.title}, {central.name}"] = _rows(central, factor)
    return lines


_LINES = _lines()

DESIGN_SPACE_RANGES = Sweep(
    name="design-space-ranges",
    title=TITLES["design-space-ranges"],
    recipe=DESIGN_SPACE_DIGITS.recipe,
    base=DESIGN_SPACE_DIGITS.base,
    rows=tuple({row.name: row for line in _LINES.values() for row in line.values()}.values()),
    panels=tuple(
        Panel(title, {label: row.name for label, row in line.items()}, in_steps=True)
        for title, line in _LINES.items()
    ),
    caveat=DESIGN_SPACE_DIGITS.caveat,
)
