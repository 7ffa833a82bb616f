"""Writing figures as PDF, SVG and PNG, and arrays as NumPy's .npz, each whole or not at all."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch import Tensor

from vision_ttt.files import write_bytes

FORMATS = ("pdf", "svg", "png")

_RESOLUTION = {"pdf": 300, "svg": 300, "png": 200}
"""Dots per inch; of the vector formats those of the pictures within."""

# Letters in a PDF stay letters, in fonts that publishers accept; SVG has no fonts and draws them.
_STYLE = {"pdf.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "vision-ttt"}


_TICKS = r"\mathdefault"
"""In the formulas that matplotlib itself writes at logarithmic axes; we write none."""


def show_dollars(figure: Figure) -> None:
    """Let every $ of a figure's texts be a dollar sign, but for those at logarithmic axes.

    matplotlib takes what stands between two of them for a formula.
    """
    for text in figure.findobj(Text):
        if "$" in text.get_text() and _TICKS not in text.get_text():
            text.set_parse_math(False)


def save_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``NAME.pdf``, ``NAME.svg`` and ``NAME.png`` into a folder, in place of former ones.

    The same figure gives the same bytes: the files hold no date.

    Returns:
        The files, in this order.

    Raises:
        OSError: a file cannot be written; its former content is kept.
    """
    show_dollars(figure)
    written = []
    for form in FORMATS:
        content = io.BytesIO()
        dates = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": None}[form]
        with mpl.rc_context(_STYLE):
            figure.savefig(content, format=form, dpi=_RESOLUTION[form], metadata=dates)
        path = folder / f"{name}.{form}"
        write_bytes(path, content.getvalue())
        written.append(path)
    return written


def save_arrays(folder: Path, name: str, arrays: Mapping[str, Tensor]) -> Path:
    """Write ``NAME.npz``, compressed, for ``numpy.load``; tensors on any device.

    Args:
        arrays: by their names in the file, which may have slashes.

    Returns:
        The file.

    Raises:
        OSError: it cannot be written; its former content is kept.
    """
    content = io.BytesIO()
    np.savez_compressed(content, **{key: x.detach().cpu().numpy() for key, x in arrays.items()})
    path = folder / f"{name}.npz"
    write_bytes(path, content.getvalue())
    return path
