"""Rows as Markdown: tables by command, a headline, and their place in a page."""

import dataclasses
from pathlib import Path

import pytest

from bench_rows import DEIT, MODEL, RUN, VITTT, timed
from studies.bench.headline import headline
from studies.bench.page import markdown, replace_in
from vision_ttt.errors import UserError


def test_headline():
    small = [timed(f"{DEIT} (fused attention)", 0.02), timed(VITTT, 0.01)]
    large = [
        dataclasses.replace(row, resolution=1280)
        for row in (
            timed(f"{DEIT}:openvino", 1.5),
            timed(f"{DEIT} (fused attention)", 3.0),
            timed(f"{DEIT} (plain attention)", 9.0),
            timed(VITTT, 0.3),
        )
    ]
    sentence, _, *table = headline([*large, *small], VITTT).splitlines()
    assert sentence == (
        f"One image of 1280² pixels, float32: `{VITTT}` takes 300 ms, 5.00 times as fast as the"
        f" strongest alternative measured, `{DEIT}:openvino`, 10.0 times as fast as eager PyTorch"
        " with fused attention, 30.0 times as fast as eager PyTorch with plain attention"
        " (A Processor, 3 GHz, 2 threads)."
    )
    assert table[2:] == [
        f"| 224² | 4 | float32 | 10.0 | `{DEIT} (fused attention)` | 20.0 | 2.00 | 2.00 |  |",
        f"| 1280² | 4 | float32 | 300 | `{DEIT}:openvino` | 1,500 | 5.00 | 10.0 | 30.0 |",
    ]
    # Said once where the strongest is one of the others.
    assert headline(small, VITTT).count("times as fast") == 1
    with pytest.raises(UserError, match="no command timed 'vittt"):
        headline([timed(VITTT, 0.1), timed(f"{DEIT}:openvino", None, "missing")], VITTT)


def test_markdown_goes_between_its_markers(tmp_path: Path):
    page = tmp_path / "README.md"
    around = "# A page\n<!-- bench:models -->\n{}<!-- /bench -->\ntext\n"
    around += "<!-- bench:other -->\n<!-- /bench -->\n"
    page.write_text(around.format("old \\1\n"))
    later = dataclasses.replace(RUN, started="later", command="vision-ttt bench models again")
    text = markdown([MODEL, dataclasses.replace(MODEL, resolution=448, run=later)])
    assert text.count("| --- |") == 2  # a table per command
    assert "A Processor, 3 GHz, 2 cores, kernels for avx2, 2 threads; torch 2.15.0" in text
    assert text.startswith("`bench models`, float32, compiled, median of 5")
    assert " ran " not in text  # kernels and commands are in the rows
    assert MODEL.run.command not in text
    for _ in range(2):
        replace_in(page, "models", text)
        assert page.read_text() == around.format(text + "\n")
    with pytest.raises(UserError, match="<!-- bench:ops -->"):
        replace_in(page, "ops", text)


def test_markdown_compares_with_rows_of_the_same_command():
    deit = dataclasses.replace(MODEL, contender=f"{DEIT} (fused attention)")
    fast = dataclasses.replace(MODEL, contender=VITTT, seconds=0.05)
    again = dataclasses.replace(deit, seconds=1.0, run=dataclasses.replace(RUN, started="later"))
    lines = [line for line in markdown([deit, fast, again]).splitlines() if line.startswith("| ")]
    (speed,) = [line.split(" | ")[6] for line in lines if line.startswith("| vittt")]
    assert speed == "2.00"
    assert sum(line.startswith("| deit") for line in lines) == 1


def test_markdown_tells_exponents_where_they_are_asked_for():
    rows = [
        dataclasses.replace(MODEL, resolution=side, seconds=1e-6 * side**3) for side in (10, 20, 40)
    ]
    assert "- deit (fused attention): time ~ tokens^1.500" in markdown(rows, between=(20, 40))
    assert "tokens^" not in markdown(rows)
