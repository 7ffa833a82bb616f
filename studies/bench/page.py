"""The newest measurements as Markdown, and its insertion into a page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from studies.bench.fits import exponents
from studies.bench.selection import newest
from vision_ttt.bench.rows import Row, Run
from vision_ttt.bench.tables import describe, tabulate
from vision_ttt.errors import UserError
from vision_ttt.files import write_text


def markdown(
    rows: Sequence[Row],
    baseline: str | None = None,
    *,
    between: tuple[int, int] | None = None,
) -> str:
    """Tables in GitHub's Markdown of the newest rows, one per command that measured them.

    A line above each table says what its rows have in common. The command with its options, the
    commit and the kernels that ran are left to the CSV file, where the start finds them.

    With `between` the exponents of time of :func:`exponents` follow each table.
    """
    shown: dict[Run, list[Row]] = {}
    for row in newest(rows):
        shown.setdefault(row.run, []).append(row)
    parts = []
    for run, own in shown.items():
        # The command's row of the baseline may be older than the baseline's newest row.
        beside = [row for row in rows if row.run == run]
        headings, lines = tabulate(own, baseline, among=beside)
        rule = ["---", *("---:" for _ in headings[1:])]
        table = "\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *lines))
        common = describe(beside, baseline, kernels=False)
        parts.append(f"`bench {own[0].what}`, {common}\n\n{table}")
        fits = exponents(beside, between) if between else {}
        if fits:
            parts.append("\n".join(f"- {fit.sentence(label)}" for label, fit in fits.items()))
    return "\n\n".join(parts)


def replace_in(page: Path, name: str, text: str) -> None:
    """Put `text` between `<!-- bench:name -->` and the next `<!-- /bench -->` of a page.

    Raises:
        UserError: the page is not text, or lacks the markers.
        OSError: the page cannot be read or written.
    """
    start, end = f"<!-- bench:{name} -->", "<!-- /bench -->"
    try:
        content = page.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{page} is not a text file: {error}") from error
    pattern = re.compile(f"({re.escape(start)}\n).*?({re.escape(end)})", re.DOTALL)
    if not pattern.search(content):
        raise UserError(f"{page} has no place for the table; put the lines {start} and {end} there")
    replaced = pattern.sub(lambda match: f"{match[1]}{text}\n{match[2]}", content, count=1)
    write_text(page, replaced)
