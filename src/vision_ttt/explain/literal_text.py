"""Names in figures as they are: matplotlib takes what stands between two $ for a formula."""

from matplotlib.figure import Figure
from matplotlib.text import Text

_TICKS = r"\mathdefault"
"""In the formulas that matplotlib itself writes at logarithmic axes; we write none."""


def show_dollars(figure: Figure) -> None:
    """Let every $ of a figure's texts be a dollar sign, but for those at logarithmic axes."""
    for text in figure.findobj(Text):
        if "$" in text.get_text() and _TICKS not in text.get_text():
            text.set_parse_math(False)
