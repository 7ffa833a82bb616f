"""Tables whose cells are for copying: printed whole, whatever the terminal's width."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def print_whole(table: Table) -> None:
    """Print a table; a narrow terminal may wrap its lines, but nothing is folded or cut off."""
    console = Console()
    whole = Measurement.get(console, console.options.update(width=10_000), table).maximum
    Console(width=max(console.width, whole)).print(table)
