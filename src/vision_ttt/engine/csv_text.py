"""Tables as the text of CSV files."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vision_ttt.shown_text import shown


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV, the control characters of texts shown; a file is looked at in terminals.

    Args:
        columns: their names, which head the table.
        rows: each a value by column; missing ones are left empty, others left out.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: shown(x) if isinstance(x, str) else x for name, x in row.items()})
    return text.getvalue()
