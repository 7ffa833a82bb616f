"""A summary of one contender's newest rows, for the top of a page."""

from __future__ import annotations

from collections.abc import Sequence

from studies.bench.selection import newest
from vision_ttt.bench.rows import Row
from vision_ttt.bench.tables import Rivals, find_rivals, machine_rates, speed
from vision_ttt.errors import UserError

_HEADINGS = (
    *("image", "batch", "dtype", "ms", "strongest alternative", "its ms"),
    *("× strongest", "× eager PyTorch", "× plain attention"),
)


def headline(rows: Sequence[Row], contender: str) -> str:
    """A sentence on the largest image and a table of every size, in Markdown.

    Each speed is a ratio within one command to the strongest alternative, to eager PyTorch with
    fused attention, and to plain attention; see :class:`vision_ttt.bench.tables.Rivals`.

    Raises:
        UserError: no command timed the contender together with another project's model.
    """
    compared = [
        (row, rivals)
        for row in newest(rows)
        if row.contender == contender and row.seconds is not None
        if (rivals := find_rivals(row, rows)).strongest is not None
    ]
    if not compared:
        raise UserError(f"no command timed {contender!r} together with another project's model")
    compared.sort(key=lambda each: (each[0].resolution, -each[0].batch_size, each[0].dtype))
    lines = [
        (
            *(f"{row.resolution}²", str(row.batch_size), row.dtype, _milliseconds(row)),
            *(f"`{rivals.strongest.contender}`", _milliseconds(rivals.strongest)),
            *(speed(row, other) for other in rivals),
        )
        for row, rivals in compared
    ]
    table = [_HEADINGS, ["---"] + ["---:"] * (len(_HEADINGS) - 1), *lines]
    return "\n".join(
        [_sentence(compared), "", *(f"| {' | '.join(cells)} |" for cells in table)],
    )


def _sentence(compared: Sequence[tuple[Row, Rivals]]) -> str:
    row, rivals = max(
        compared,
        key=lambda each: (each[0].resolution, each[0].dtype == "float32", each[0].run.started),
    )
    run = row.run
    others = {
        f"the strongest alternative measured, `{rivals.strongest.contender}`": rivals.strongest,
        "eager PyTorch with fused attention": rivals.eager,
        "eager PyTorch with plain attention": rivals.plain,
    }
    said = {  # once where the strongest is one of the others
        other.contender: f"{speed(row, other)} times as fast as {name}"
        for name, other in reversed(others.items())
        if other is not None
    }
    machine = "; ".join([f"{run.processor}, {run.threads} threads", *machine_rates(row)])
    return (
        f"One image of {row.resolution}² pixels, {row.dtype}: `{row.contender}` takes"
        f" {_milliseconds(row)} ms, {', '.join(reversed(said.values()))} ({machine})."
    )


def _milliseconds(row: Row) -> str:
    milliseconds = 1e3 * row.seconds
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"
