"""The pictures that commands write, in the format of their suffix."""

import io
import logging
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from studies.bench.figures import chosen_lines, cost_figure
from studies.bench.fits import by_line
from vision_ttt.bench.rows import Row
from vision_ttt.errors import UserError
from vision_ttt.files import write_bytes

_log = logging.getLogger(__name__)


def check_picture(path: str | None) -> None:
    """Raise UserError where matplotlib does not know the picture's format."""
    known = Figure().canvas.get_supported_filetypes()
    if path is not None and Path(path).suffix.removeprefix(".").lower() not in known:
        raise UserError(f"figure is {path!r}; its suffix must be one of {', '.join(sorted(known))}")


def draw(rows: Sequence[Row], path: Path, lines: Sequence[str] | None) -> None:
    """Write the picture of cost against size, in the format of the path's suffix."""
    drawn = chosen_lines(rows, lines)
    left_out = [label for label in by_line(rows) if label not in drawn]
    if left_out:
        _log.info("the picture leaves out %s; --lines names others", ", ".join(left_out))
    write_picture(cost_figure(drawn), path, dpi=150)


def write_picture(figure: Figure, path: Path, *, dpi: int) -> None:
    """Write a picture whole or not at all, in the format of the path's suffix.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.removeprefix(".").lower(), dpi=dpi)
    write_bytes(path, content.getvalue())
