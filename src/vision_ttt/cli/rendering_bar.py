"""The bar that commands show while they render pictures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vision_ttt.safe_console import SafeConsole


@contextmanager
def rendering_bar(kind: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr, if that is a terminal; yield what takes the number that are done."""
    bar = Progress(
        TextColumn(f"rendering {kind}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=SafeConsole(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    with bar:
        shown = bar.add_task("", total=total)
        yield lambda done: bar.update(shown, completed=done)
