"""Rows: a CSV file that keeps everything, the newest rows, ratios, tables, README, figures."""

import csv
import dataclasses
from pathlib import Path

import pytest

from vision_ttt.bench.figures import cost_figure
from vision_ttt.bench.readme import markdown, replace_in
from vision_ttt.bench.rows import COLUMNS, Row, Run, append_rows, comparable, newest, read_rows
from vision_ttt.bench.tables import describe, exponents, tabulate
from vision_ttt.errors import UserError

RUN = Run(
    started="2026-01-02T03:04:05+00:00",
    command="vision-ttt bench models --models 'a, \"b\"'",
    commit="",
    processor="A Processor, 3 GHz",
    cores=2,
    instruction_set="avx2",
    threads=2,
    device_name="A Processor, 3 GHz",
    python="3.11.0",
    torch="2.15.0",
    timm="1.0.0",
    vision_ttt="0.1.0",
)
PIXELS = "pixels along a side"
MODEL = Row(
    what="models",
    contender="deit (fused attention)",
    measured="inference",
    resolution=224,
    tokens=None,
    heads=None,
    dim=None,
    mini_batch_size=None,
    batch_size=4,
    device="cpu",
    dtype="float32",
    compiled=True,
    seconds=0.1,
    seconds_spread=0.002,
    repeats=5,
    macs=1_250_000_000,
    peak_bytes=3 * 2**20,
    matmul_macs_per_second=None,
    run=RUN,
)
OP = dataclasses.replace(
    MODEL,
    what="ops",
    contender="cpu",
    measured="forward",
    resolution=None,
    tokens=6400,
    heads=6,
    dim=64,
    mini_batch_size=16,
    batch_size=2,
    compiled=False,
    peak_bytes=None,
    macs=10**9,
    matmul_macs_per_second=2e10,
)


def test_rows_come_back_as_they_were(tmp_path: Path):
    path = tmp_path / "new" / "rows.csv"
    append_rows(path, [MODEL])
    append_rows(path, [OP])
    assert read_rows(path) == [MODEL, OP]
    assert len(path.read_text().splitlines()) == 3
    assert [file.name for file in path.parent.iterdir()] == ["rows.csv"]


def test_a_foreign_or_damaged_file_is_left_alone(tmp_path: Path):
    path = tmp_path / "foreign.csv"
    path.write_text("name,value\n1,2\n")
    with pytest.raises(UserError, match="its columns are"):
        append_rows(path, [MODEL])
    assert path.read_text() == "name,value\n1,2\n"
    damaged = tmp_path / "damaged.csv"
    append_rows(damaged, [MODEL])
    damaged.write_text(damaged.read_text().replace(",224,", ",many,"))
    with pytest.raises(UserError, match=r"line 2.*many"):
        read_rows(damaged)
    damaged.write_text(damaged.read_text().replace(",many,", ",224,").replace("True", "Yes"))
    with pytest.raises(UserError, match=r"line 2.*Yes"):
        read_rows(damaged)
    damaged.write_text(damaged.read_text().replace("Yes", "True").rsplit(",", 3)[0] + "\n")
    with pytest.raises(UserError, match=rf"line 2: not {len(COLUMNS)} cells"):
        read_rows(damaged)


def test_derived_figures():
    assert MODEL.per_second == pytest.approx(40)
    assert OP.per_second == pytest.approx(2 * 6400 / 0.1)
    assert OP.matmul_share == pytest.approx(0.5)
    assert MODEL.matmul_share is None


def test_newest_row_of_each_settings():
    later = dataclasses.replace(MODEL, seconds=0.05, run=dataclasses.replace(RUN, started="later"))
    other = dataclasses.replace(MODEL, dtype="bfloat16")
    assert newest([MODEL, other, later]) == [other, later]
    for change in ({"case": "another"}, {"autocast": True}):
        apart = dataclasses.replace(MODEL, **change)
        assert newest([MODEL, apart]) == [MODEL, apart]
    assert comparable([MODEL, other, later]) == [MODEL, later]


def test_ratios_hold_within_one_command_only():
    fast = dataclasses.replace(MODEL, contender="vittt", seconds=0.025, macs=250_000_000)
    elsewhere = dataclasses.replace(fast, run=dataclasses.replace(RUN, started="later"))
    larger = dataclasses.replace(fast, resolution=448)
    headings, lines = tabulate([MODEL, fast, elsewhere, larger])
    column = headings.index("× baseline")
    assert [line[column] for line in lines] == ["1.00", "4.00", "", ""]
    assert [line[headings.index("by MACs")] for line in lines] == ["1.00", "5.00", "", ""]
    assert lines[1] == ["vittt", "224²", "4", "25.0", "2.00", "160", "4.00", "5.00", "250M", "3.0"]
    assert tabulate([MODEL, fast], "vittt").lines[0][column] == "0.250"


def test_table_of_ops():
    headings, (line,) = tabulate([OP])
    assert dict(zip(headings, line, strict=True)) == {
        "contender": "cpu",
        "pass": "forward",
        "tokens": "6,400",
        "batch": "2",
        "ms": "100",
        "±": "2.00",
        "tokens/s": "128,000",
        "× baseline": "1.00",
        "of matmul": "50%",
        "MACs": "1G",
        "MiB": "",
    }


def test_exponents():
    rows = [
        dataclasses.replace(MODEL, resolution=side, seconds=1e-6 * side**3) for side in (10, 20, 40)
    ]
    rows.append(dataclasses.replace(MODEL, resolution=80, seconds=None, failure="out of memory"))
    # Tokens grow as side².
    assert exponents(rows) == {MODEL.contender: (pytest.approx(1.5), 10, 40, PIXELS)}
    assert exponents([MODEL]) == {}
    rows[0] = dataclasses.replace(rows[0], seconds=1.0)
    fit = exponents(rows, (20, 100))[MODEL.contender]
    assert fit == (pytest.approx(1.5), 20, 40, PIXELS)
    assert fit.sentence("a") == "a: time ~ tokens^1.500 between 20 and 40 pixels along a side"
    ops = [dataclasses.replace(OP, tokens=n, seconds=n**2) for n in (10, 20, 30)]
    assert exponents(ops, (10, 20)) == {"cpu, forward": (pytest.approx(2), 10, 20, "tokens")}
    assert "- deit (fused attention): time ~ tokens^1.500" in markdown(rows, between=(20, 40))
    assert "tokens^" not in markdown(rows)


def test_each_size_of_model_has_its_own_baseline():
    def row(contender: str, seconds: float | None, failure: str = "") -> Row:
        return dataclasses.replace(MODEL, contender=contender, seconds=seconds, failure=failure)

    rows = [
        row("deit_small_patch16_224 (fused attention)", 3.0),
        row("deit_small_patch16_224 (plain attention)", 6.0),
        row("deit_base_patch16_224 (fused attention)", 8.0),
        row("vittt_small_patch16_224", 1.0),
        row("vittt_base_patch16_224", 2.0),
        row("vittt_nano_patch4_32", 0.5),
    ]
    headings, lines = tabulate(rows)
    column = headings.index("× baseline")
    assert [line[column] for line in lines] == ["1.00", "0.500", "1.00", "3.00", "4.00", "6.00"]
    assert "baseline: deit_small_patch16_224 (fused attention), deit_base" in describe(rows)
    named = tabulate(rows, "deit_base_patch16_224 (fused attention)").lines
    assert named[3][column] == "8.00"
    without = [*rows[:2], row(rows[2].contender, None, "out of memory"), *rows[3:]]
    lines = tabulate(without).lines
    assert lines[2][headings.index("ms")] == "out of memory"
    assert [line[column] for line in lines] == ["1.00", "0.500", "", "3.00", "", "6.00"]


def test_kernels_and_gpu_are_told():
    kernels = "attention by flash_attention"
    on_gpu = dataclasses.replace(
        RUN, device_name="A GPU", cuda="13.2", driver="580.1", clocks="1 GHz", triton="3.9.0"
    )
    row = dataclasses.replace(
        MODEL, device="cuda", dtype="bfloat16", autocast=True, kernels=kernels, run=on_gpu
    )
    said = describe([row, dataclasses.replace(row, resolution=448)])
    assert "A GPU (driver 580.1, CUDA 13.2, 1 GHz, A Processor" in said
    assert "torch 2.15.0, timm 1.0.0, triton 3.9.0, vision-ttt 0.1.0" in said
    assert "bfloat16 autocast, compiled, median" in said
    assert said.count(f"deit (fused attention) ran {kernels}") == 1
    assert "driver" not in describe([MODEL])


def test_a_file_of_a_former_version_is_read_and_grows(tmp_path: Path):
    path = tmp_path / "rows.csv"
    append_rows(path, [MODEL])
    header, cells = path.read_text().splitlines()
    old = [name for name in header.split(",") if name not in ("failure", "case", "kernels", "cuda")]
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, old, extrasaction="ignore")
        writer.writeheader()
        writer.writerow(row)
    assert read_rows(path) == [MODEL]
    failed = dataclasses.replace(
        MODEL, seconds=None, seconds_spread=None, failure="out of memory", kernels="a, b"
    )
    append_rows(path, [failed])
    assert read_rows(path) == [MODEL, failed]
    assert path.read_text().splitlines()[:2] == [header, cells]


def test_markdown_goes_between_its_markers(tmp_path: Path):
    page = tmp_path / "README.md"
    around = "# A page\n<!-- bench:models -->\n{}<!-- /bench -->\ntext\n"
    around += "<!-- bench:other -->\n<!-- /bench -->\n"
    page.write_text(around.format("old \\1\n"))
    later = dataclasses.replace(RUN, started="later", command="vision-ttt bench models again")
    text = markdown([MODEL, dataclasses.replace(MODEL, resolution=448, run=later)])
    assert text.count("| --- |") == 2  # a table per command
    assert "A Processor, 3 GHz, 2 cores, kernels for avx2, 2 threads; torch 2.15.0" in text
    for _ in range(2):
        replace_in(page, "models", text)
        assert page.read_text() == around.format(text + "\n")
    with pytest.raises(UserError, match="<!-- bench:ops -->"):
        replace_in(page, "ops", text)


def test_markdown_compares_with_the_baseline_of_the_same_command():
    fast = dataclasses.replace(MODEL, contender="vittt", seconds=0.05)
    again = dataclasses.replace(MODEL, seconds=1.0, run=dataclasses.replace(RUN, started="later"))
    lines = [line for line in markdown([MODEL, fast, again]).splitlines() if line.startswith("| ")]
    (speed,) = [line.split(" | ")[6] for line in lines if line.startswith("| vittt")]
    assert speed == "2.00"
    assert sum(line.startswith("| deit") for line in lines) == 1


@pytest.mark.parametrize(("row", "panels"), [(MODEL, 3), (OP, 2)])
def test_figure_has_a_line_per_contender_on_log_axes(row: Row, panels: int):
    double = {"resolution": 448} if row.tokens is None else {"tokens": 12800}
    rows = [row, dataclasses.replace(row, **double), dataclasses.replace(row, contender="b")]
    rows.append(dataclasses.replace(rows[1], contender="c", seconds=None, failure="out of memory"))
    figure = cost_figure(rows)
    assert len(figure.axes) == panels  # memory only where it was measured
    for axis in figure.axes:
        assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
        assert [len(line.get_xdata()) for line in axis.lines] == [2, 1, 1]
    figure.draw_without_rendering()
    with pytest.raises(ValueError, match="no rows"):
        cost_figure([])
