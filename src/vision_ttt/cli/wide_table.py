"""Tables whose cells are for copying: printed whole, whatever the terminal's width."""

from rich.measure import Measurement
from rich.table import Table

from vision_ttt.cli.plain_console import plain_console


def print_whole(table: Table) -> None:
    """Print a table; a narrow terminal may wrap its lines, but nothing is folded or cut off."""
    console = plain_console()
    whole = Measurement.get(console, console.options.update(width=10_000), table).maximum
    plain_console(width=max(console.width, whole)).print(table)
