"""The report of a run: one self-contained HTML page with its figures."""

from __future__ import annotations

import base64
import importlib.resources
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
from matplotlib.figure import Figure

from vision_ttt.explain.saving import show_dollars
from vision_ttt.shown_text import shown

_DOTS_PER_INCH = 130


@dataclass(frozen=True)
class Section:
    """A figure of the report with its heading and a few sentences on how to read it."""

    heading: str
    caption: str
    figure: Figure
    narrow: Figure | None = None
    """The figure for a phone's screen, where the text of the other would be too small."""

    @cached_property
    def png(self) -> bytes:
        """The figure as a PNG file's content; drawn once, for the file and for the page."""
        return png_bytes(self.figure)


@dataclass(frozen=True)
class Picture:
    """A picture that was drawn before, in place of a :class:`Section`."""

    heading: str
    caption: str
    png: bytes
    """A PNG file's content."""
    narrow: None = None


@dataclass(frozen=True)
class PageTable:
    """A table of the report with its heading and a few sentences on what it holds."""

    heading: str
    caption: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    """Cells; the first column is text, the others are figures."""


@dataclass(frozen=True)
class Text:
    """A text of the report, its spaces and line ends as they are, with its heading."""

    heading: str
    caption: str
    text: str


def png_bytes(figure: Figure) -> bytes:
    """The figure as a PNG file's content."""
    show_dollars(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH)
    return buffer.getvalue()


def render_report(
    title: str,
    summary: Mapping[str, Any],
    sections: Sequence[Section | Picture],
    configuration: str,
    tables: Sequence[PageTable] = (),
    texts: Sequence[Text] = (),
) -> str:
    """Render HTML that needs no other file, no network and no script.

    Figures fit the page, on a phone in their narrow form. Each one links to its full size.

    Args:
        title: of the page.
        summary: name → value, shown as a table in this order.
        sections: figures, in this order.
        configuration: the run's configuration as text.
        tables: above the figures, in this order.
        texts: below the figures, in this order.
    """
    template = importlib.resources.files("vision_ttt.explain").joinpath("report.html.jinja")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: shown(value) if isinstance(value, str) else value,
    )
    pictures = [
        (
            section.heading,
            section.caption,
            _encoded(section.png),
            None if section.narrow is None else _encoded(png_bytes(section.narrow)),
        )
        for section in sections
    ]
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        title=title,
        summary=summary,
        tables=tables,
        pictures=pictures,
        texts=texts,
        configuration=configuration,
    )


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()
