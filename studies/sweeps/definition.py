"""What a sweep is: rows that change a recipe, each trained with several seeds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision_ttt import recipes
from vision_ttt.engine import TrainConfig
from vision_ttt.engine.checkpoint import WEIGHTS_FILE
from vision_ttt.errors import UserError, suggestions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from studies.sweeps.results import Result
    from vision_ttt.bench.tables import Table
    from vision_ttt.engine.train import TrainResult


@dataclass(frozen=True)
class SameSeconds:
    """The length of runs that are to train for as many seconds as those of another row.

    It is known when that row is trained, and the pace of both rows is measured in turns: what runs
    beside the runs does not matter.
    """

    row: str
    """Name of the other row."""


@dataclass(frozen=True)
class GivenSeconds:
    """The length of runs that are to train for so many seconds.

    The pace of each row is measured in CPU time before the runs begin, all rows in turns, so that
    its updates do not depend on what runs beside the runs.
    """

    seconds: float
    """CPU time of updates on one thread; reading data and evaluations are not counted."""


@dataclass(frozen=True)
class ShareOfUpdates:
    """The length of runs that make a share of another row's updates, known when that is trained."""

    row: str
    """Name of the other row."""
    share: float


@dataclass(frozen=True)
class Variant:
    """One row: a recipe with some of its fields changed."""

    name: str
    """Folder of its runs, and what `--rows` calls it."""
    changes: Mapping[str, Any]
    """Fields of :class:`TrainConfig`; named as for
    :func:`vision_ttt.recipes.resolve`; `arguments` add to the recipe's, null removes one."""
    published: float | None = None
    """The paper's own figure for this row, in the sweep's `published_unit`."""
    note: str = ""
    """What a reader must know about the row, for the table."""
    length: SameSeconds | GivenSeconds | ShareOfUpdates | None = None
    """Where it is given, it replaces the recipe's length."""
    start: str | None = None
    """Name of a row from whose last weights, of the same seed, the runs start."""
    recipe: str | None = None
    """Name or path of a recipe that replaces the sweep's."""
    seeded: tuple[str, ...] = ()
    """Fields that a seed sets, beside the sweep's."""
    has_accuracy: bool = True
    """Whether its task measures the sweep's `accuracy`; the results of one that does not, as
    pre-training, have NaN."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The names of the rows whose runs must be finished before this row's."""
        match self.length:
            case SameSeconds(row) | ShareOfUpdates(row):
                names = (row,)
            case _:
                names = ()
        return names if self.start is None else (*names, self.start)


@dataclass(frozen=True)
class Panel:
    """Rows that belong side by side: one part of the table and of the picture.

    A row may stand in several panels, under a name that fits each.
    """

    title: str
    rows: Mapping[str, str]
    """Label in this panel → name of the row."""
    in_steps: bool = False
    """Whether each row goes a step further than the one before; the picture joins their means."""


@dataclass(frozen=True)
class Column:
    """A column of a sweep's tables beside those that every sweep has."""

    heading: str
    value: Callable[[Result], float]
    decimals: int
    relative_to: str | None = None
    """Name of a row: the column is the value in % of that of this row's run of the same seed."""
    is_time: bool = False
    """Runs on several processors are listed, as a mean of their times would say nothing."""


@dataclass(frozen=True)
class Sweep:
    """A named list of rows to train and to compare.

    Raises:
        ValueError: a panel names a row that is not there, or a row stands in no panel; a row takes
            its length or weights from rows that are not there or take theirs from others.
    """

    name: str
    title: str
    recipe: str
    """Name or path, as of :func:`vision_ttt.recipes.read`."""
    base: Mapping[str, Any]
    """Fields that differ from the recipe's in every row."""
    rows: tuple[Variant, ...]
    panels: tuple[Panel, ...]
    caveat: str
    """How far the result may be trusted, in a sentence for the table and the picture."""
    published_unit: str = ""
    """What the papers' figures are, e.g. "top-1 of Vittt-T on ImageNet-1K, %"; empty for none."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """That each row is trained with, unless others are asked for."""
    seeded: tuple[str, ...] = ("seed",)
    """Fields of :class:`TrainConfig` that a seed sets; `split_seed` among them where each seed is
    to have a split of its own."""
    columns: tuple[Column, ...] = ()
    """Of the tables, beside loss and accuracy."""
    accuracy: str = "test_accuracy"
    """The figure of metrics.json, from 0 to 1, that stands for accuracy."""
    unit: str = "images"
    """What the task of the recipe counts, in the plural."""
    losses: str = "train loss has label smoothing and augmentation"
    """What a reader must know about the losses, beside that they are cross-entropies in nats."""
    examine: Callable[[TrainResult], Mapping[str, Any]] | None = None
    """What else is measured on each trained model, as JSON has it; becomes `Result.measures`. A
    function of a module, for each run has a process of its own."""
    tables: Callable[[Sweep, Sequence[Result]], Sequence[Table]] | None = None
    """Tables that stand before those of the panels, of what `examine` has measured."""
    draw: Callable[[Sweep, Sequence[Result]], Figure] | None = None
    """The picture; None for :func:`studies.sweeps.figure.sweep_figure`."""
    by_name: Mapping[str, Variant] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        by_name = {row.name: row for row in self.rows}
        shown = {name for panel in self.panels for name in panel.rows.values()}
        if len(by_name) < len(self.rows) or shown != set(by_name):
            raise ValueError(
                f"sweep {self.name}: rows {sorted(row.name for row in self.rows)} and the panels' "
                f"{sorted(shown)} must be the same, each once"
            )
        for row in self.rows:
            for name in row.needs:
                other = by_name.get(name)
                if other is None or other.length is not None or other.start is not None:
                    raise ValueError(
                        f"sweep {self.name}: row {row.name!r} takes its length or weights from"
                        f" {name!r}, which must be a row with a length and weights of its own"
                    )
        object.__setattr__(self, "by_name", by_name)

    def find(self, names: Sequence[str] | None) -> tuple[Variant, ...]:
        """The rows of these names, each once; None for all.

        Raises:
            UserError: a name is unknown; names the nearest.
        """
        if names is None:
            return self.rows
        for name in names:
            if name not in self.by_name:
                raise UserError(
                    f"sweep {self.name} has no row {name!r}; {suggestions(name, self.by_name)}"
                )
        return tuple(self.by_name[name] for name in dict.fromkeys(names))

    def panels_of(self, names: Collection[str]) -> list[int]:
        """The numbers of the panels to show if the rows `names` have results.

        A panel must have two of them, or one that no earlier panel has: alone, the row whose
        seconds the others are given needs no second panel.
        """
        shown, numbers = set(), []
        for number, panel in enumerate(self.panels):
            own = set(panel.rows.values()) & set(names)
            if len(own) > 1 or own - shown:
                numbers.append(number)
                shown |= own
        return numbers

    def only(self, titles: Sequence[str]) -> Sweep:
        """The sweep with some of its panels, and the rows that stand in them.

        Raises:
            UserError: no panel has such a title; names the nearest.
        """
        by_title = {panel.title: panel for panel in self.panels}
        for title in titles:
            if title not in by_title:
                raise UserError(
                    f"sweep {self.name} has no panel {title!r}; {suggestions(title, by_title)}"
                )
        panels = tuple(by_title[title] for title in titles)
        shown = {name for panel in panels for name in panel.rows.values()}
        for name in shown:
            if not shown.issuperset(self.by_name[name].needs):
                raise UserError(
                    f"row {name!r} takes its length or weights from other rows; show all panels"
                    " together"
                )
        rows = tuple(row for row in self.rows if row.name in shown)
        return replace(self, rows=rows, panels=panels)

    def config(
        self, row: Variant, seed: int, folder: Path, overrides: Mapping[str, Any] | None = None
    ) -> TrainConfig:
        """The training run of a row with a seed, in its place under `folder`.

        Raises:
            ConfigError: a value is out of its range.
        """
        values = recipes.read(row.recipe or self.recipe)
        own = dict.fromkeys((*self.seeded, *row.seeded), seed)
        own["output"] = str(folder / row.name / f"seed-{seed}")
        if row.start is not None:
            own["initial_weights"] = str(folder / row.start / f"seed-{seed}" / WEIGHTS_FILE)
        for changes in (self.base, row.changes, overrides or {}, own):
            values = recipes.merge(values, changes)
        return recipes.resolve(values)
