"""The report of a run: one self-contained HTML page with its figures."""

from __future__ import annotations

import base64
import importlib.resources
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from matplotlib.figure import Figure


class Section(NamedTuple):
    """A figure of the report with its heading and a few sentences on how to read it."""

    heading: str
    caption: str
    figure: Figure
    narrow: Figure | None = None
    """The figure for a phone's screen, where the text of the other would be too small."""


def png_bytes(figure: Figure, dots_per_inch: int = 130) -> bytes:
    """The figure as a PNG file's content."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dots_per_inch)
    return buffer.getvalue()


def render_report(
    title: str, summary: Mapping[str, Any], sections: Sequence[Section], configuration: str
) -> str:
    """Render HTML that needs no other file, no network and no script.

    Figures fit the page, on a phone in their narrow form. Each one links to its full size.

    Args:
        title: of the page.
        summary: name → value, shown as a table in this order.
        sections: figures, in this order.
        configuration: the run's configuration as text.
    """
    template = importlib.resources.files("vision_ttt.explain").joinpath("report.html.jinja")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    pictures = [
        (section.heading, section.caption, _encoded(section.figure), _encoded(section.narrow))
        for section in sections
    ]
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        title=title, summary=summary, pictures=pictures, configuration=configuration
    )


def _encoded(figure: Figure | None) -> str | None:
    return None if figure is None else base64.b64encode(png_bytes(figure)).decode()
