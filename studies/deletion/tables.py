"""Deletion and insertion as tables: areas under the curves, mean and spread over the seeds."""

from __future__ import annotations

from collections.abc import Sequence

from studies.deletion.results import DeletionResult
from studies.deletion.study import RANDOM, MapCurves
from studies.spread import Spread
from vision_ttt.bench.tables import Table
from vision_ttt.errors import UserError

CAVEAT = (
    "Small-scale evidence: nano models on small images. Images with replaced pixels are others "
    "than those of training, so that only gains against a random order with the same fill mean "
    "anything, and those below the spread mean nothing."
)


def by_model(results: Sequence[DeletionResult]) -> dict[str, list[DeletionResult]]:
    """The results of each model on each data set, by a title, as they first come.

    The title has the last part of a data set's name, which may be a folder.
    """
    found: dict[str, list[DeletionResult]] = {}
    for result in results:
        data = result.data.rstrip("/").rpartition("/")[2]
        found.setdefault(f"{result.model} on {data}", []).append(result)
    return found


def panels(
    results: Sequence[DeletionResult], fill: str | None = None
) -> dict[str, list[MapCurves]]:
    """The curves of one fill, the first by default, by the titles of :func:`by_model`.

    Raises:
        UserError: there are none.
    """
    fill = results[0].curves.fill if fill is None and results else fill
    found = {
        title: [each.curves for each in own if each.curves.fill == fill]
        for title, own in by_model(results).items()
    }
    if not found or not all(found.values()):
        raise UserError(f"there are no results with fill {fill!r} of every model")
    return found


def tabulate_deletion(results: Sequence[DeletionResult]) -> Table:
    """One model on one data set: a line per method and fill.

    The gains are differences to the random order with the same checkpoint and fill, positive where
    the map is better than it; their spread is that of the differences.

    Raises:
        UserError: a checkpoint has no random order.
    """
    headings = ["pixels become", "order by"]
    headings += ["deletion area ↓", "gain", "insertion area ↑", "gain", "models"]
    chance = {
        (each.checkpoint, each.curves.fill): each.curves
        for each in results
        if each.curves.method == RANDOM
    }
    groups: dict[tuple[str, str], list[DeletionResult]] = {}
    for each in results:
        groups.setdefault((each.curves.fill, each.curves.method), []).append(each)
        if (each.checkpoint, each.curves.fill) not in chance:
            raise UserError(
                f"{each.checkpoint} has no result of a random order with fill {each.curves.fill!r}"
            )
    lines = []
    for (fill, method), own in groups.items():
        compared = [(each.curves, chance[each.checkpoint, fill]) for each in own]
        gains = {
            "deletion": [other.deletion_area - map_.deletion_area for map_, other in compared],
            "insertion": [map_.insertion_area - other.insertion_area for map_, other in compared],
        }
        line = [fill, method]
        for measure, gain in gains.items():
            areas = [getattr(each.curves, f"{measure}_area") for each in own]
            line.append(Spread.of(areas).text(3))
            line.append("" if method == RANDOM else _signed(Spread.of(gain)))
        lines.append([*line, str(len(own))])
    order = list(dict.fromkeys(line[0] for line in lines))
    return Table(headings, sorted(lines, key=lambda line: order.index(line[0])))


def describe_deletion(results: Sequence[DeletionResult]) -> str:
    """What the numbers are and where they come from, in one paragraph.

    The rows of the results have each run's command and commit.
    """
    runs = [each.run for each in results]
    machines = dict.fromkeys(
        f"{run.device_name}, {run.threads} threads, torch {run.torch}, timm {run.timm},"
        f" vision-ttt {run.vision_ttt}"
        for run in runs
    )
    started = sorted(run.started for run in runs)
    images = sorted({each.images for each in results})
    draws = max(each.curves.draws for each in results)
    points = sorted({len(each.curves.shares) for each in results})
    parts = [
        "`deletion`, mean ± sample standard deviation over models trained with"
        f" different seeds, on {_either(images)} test images, curves of {_either(points)} points;"
        f" gain: against the random order (mean of {draws}) with the same model and fill, positive"
        " where the map is better",
        " and ".join(machines),
        f"{started[0]} to {started[-1]}",
    ]
    return f"{'; '.join(parts)}. {CAVEAT}"


def deletion_markdown(results: Sequence[DeletionResult]) -> str:
    """The whole in GitHub's Markdown: its description, then a table for each model and data set.

    Raises:
        UserError: there are no results, or a checkpoint has no random order.
    """
    if not results:
        raise UserError("there are no results of deletion and insertion")
    parts = [describe_deletion(results)]
    for title, own in by_model(results).items():
        headings, lines = tabulate_deletion(own)
        rule = ["---", "---", *("---:" for _ in headings[2:])]
        table = "\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *lines))
        parts.append(f"**{title}**, {own[0].tokens} tokens\n\n{table}")
    return "\n\n".join(parts)


def _signed(spread: Spread) -> str:
    text = spread.text(3)
    return text if text.startswith("-") else f"+{text}"


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(f"{number:,}" for number in numbers)
