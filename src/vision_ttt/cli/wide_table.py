"""Tables whose cells are for copying: printed whole, whatever the terminal's width."""

from collections.abc import Iterable, Sequence

from rich.measure import Measurement
from rich.table import Table

from vision_ttt.cli.plain_console import plain_console


def print_whole(table: Table) -> None:
    """Print a table; a narrow terminal may wrap its lines, but nothing is folded or cut off."""
    console = plain_console()
    whole = Measurement.get(console, console.options.update(width=10_000), table).maximum
    plain_console(width=max(console.width, whole)).print(table)


def print_figures(
    headings: Sequence[str],
    lines: Iterable[Sequence[str]],
    *,
    names: int = 1,
    title: str | None = None,
    caption: str | None = None,
) -> None:
    """Print lines of cells as a table, all but the first `names` columns right-aligned."""
    table = Table(title=title, caption=caption)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < names else "right")
    for line in lines:
        table.add_row(*line)
    print_whole(table)
