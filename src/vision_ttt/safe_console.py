"""The console of everything that is printed: only its own control characters act."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from vision_ttt.shown_text import shown

BROKEN_PIPE = 141
"""Exit code, 128 + SIGPIPE: the reader of the output has closed it."""


class SafeConsole(Console):
    """rich's console, which shows the control characters of what it prints, by `shown`."""

    def on_broken_pipe(self) -> None:
        """End the process with `BROKEN_PIPE`; rich's own method ends it with 1, as failures do."""
        # Python flushes once more at its end, which would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE)

    def render_str(self, text: str, **options: Any) -> Text:
        """Show them before what is in a table is measured."""
        return super().render_str(shown(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Show those of texts that are no strings, too, such as those beside a bar."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown(segment.text))
