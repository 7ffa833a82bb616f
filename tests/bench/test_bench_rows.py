"""Rows: a CSV file that keeps everything, ratios, tables."""

import csv
import dataclasses
from pathlib import Path

import pytest

from bench_rows import DEIT, MODEL, OP, RUN, VITTT, timed
from vision_ttt.bench.rows import COLUMNS, Row, append_rows, read_rows
from vision_ttt.bench.tables import _count, describe, tabulate
from vision_ttt.errors import UserError


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


def test_ratios_hold_within_one_command_only():
    fast = dataclasses.replace(MODEL, contender="vittt", seconds=0.025, macs=250_000_000)
    elsewhere = dataclasses.replace(fast, run=dataclasses.replace(RUN, started="later"))
    larger = dataclasses.replace(fast, resolution=448, contender=VITTT)
    headings, lines = tabulate([MODEL, fast, elsewhere, larger], MODEL.contender)
    column = headings.index("× baseline")
    assert [line[column] for line in lines] == ["1.00", "4.00", "", ""]
    assert [line[headings.index("by MACs")] for line in lines] == ["1.00", "5.00", "", ""]
    assert lines[1] == ["vittt", "224²", "4", "25.0", "2.00", "160", "4.00", "5.00", "250M", "3.0"]
    assert tabulate([MODEL, fast], "vittt").lines[0][column] == "0.250"
    ours = dataclasses.replace(elsewhere, contender=VITTT)
    headings, lines = tabulate([MODEL, ours, larger])
    assert [line[headings.index("× strongest")] for line in lines] == ["1.00", "", ""]


def test_a_row_is_compared_with_the_baseline_at_its_batch():
    slow = dataclasses.replace(OP, contender="dual")
    rows = [slow, OP] + [dataclasses.replace(row, batch_size=16, seconds=4.0) for row in (slow, OP)]
    headings, lines = tabulate(rows, "dual")
    assert [line[headings.index("× baseline")] for line in lines] == 4 * ["1.00"]


def test_table_of_ops():
    headings, (line,) = tabulate([dataclasses.replace(OP, fma_macs_per_second=4e10)])
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
        "of FMA peak": "25%",
        "MACs": "1G",
        "MiB": "",
    }


def _column(rows: list[Row], heading: str) -> list[str]:
    headings, lines = tabulate(rows)
    return [line[headings.index(heading)] for line in lines]


def test_a_model_is_compared_with_the_strongest_of_its_size_then_eager_then_plain():
    rows = [
        timed(f"{DEIT} (fused attention)", 3.0),
        timed(f"{DEIT} (plain attention)", 6.0),
        timed(f"{DEIT}:openvino", 1.5),
        timed(f"{DEIT}:onnxruntime", None, "onnx not installed"),
        timed("deit_base_patch16_224 (fused attention)", 8.0),
        timed(VITTT, 1.0),
        timed(f"{VITTT}:for_inference", 0.5),  # no rival, fast as it is
        timed("vittt_base_patch16_224", 2.0),
        timed("vittt_nano_patch4_32", 0.5),  # there is no rival of its size
    ]
    strongest = ["0.500", "0.250", "1.00", "", "1.00", "1.50", "3.00", "4.00", "3.00"]
    assert _column(rows, "× strongest") == strongest
    assert _column(rows, "× eager") == [
        *("1.00", "0.500", "2.00", "", "1.00", "3.00", "6.00", "4.00", "6.00")
    ]
    assert _column(rows, "× plain")[4:8] == ["", "6.00", "12.0", ""]
    assert "baseline" not in describe(rows)
    named = tabulate(rows, "deit_base_patch16_224 (fused attention)")
    assert named.lines[5][named.headings.index("× baseline")] == "8.00"
    assert not any("×" in heading for heading in tabulate(rows[5:8]).headings)


def test_what_the_machine_can_do_is_told():
    assert "FMA peak" not in describe([MODEL])
    rates = {"fma_macs_per_second": 1e11, "product_macs_per_second": 8e10}
    assert "; FMA peak 200, best product float32 160 GFLOP/s;" in describe(
        [dataclasses.replace(MODEL, **rates)]
    )


def test_memory_that_is_held_has_a_column_where_it_was_measured():
    assert "MiB held" not in tabulate([MODEL]).headings
    held = dataclasses.replace(MODEL, held_bytes=5 * 2**20, memory_runs=3)
    assert _column([held, MODEL], "MiB held") == ["5.0", ""]


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
    added = ("failure", "case", "kernels", "cuda", "held_bytes", "fma_macs_per_second")
    old = [name for name in header.split(",") if name not in added]
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


def test_counts_have_three_digits_and_a_unit():
    counts = {999_400: "999400", 999_600: "1M", 1_234_567: "1.23M", 999_900_000: "1G", 2e12: "2T"}
    assert {value: _count(value) for value in counts} == counts
