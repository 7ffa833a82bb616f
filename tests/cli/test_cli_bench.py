"""`vision-ttt bench`."""

import json
from pathlib import Path

import pytest
import torch

from vision_ttt.bench.names import DEPLOYED, TINY, TRAINED
from vision_ttt.bench.rows import append_rows, read_rows
from vision_ttt.cli import bench, bench_session
from vision_ttt.cli.main import main
from vision_ttt.errors import UserError
from vision_ttt.ops._table import TABLE

SHAPE = ["--shape", "1", "40", "2", "16", "--mini-batch-size", "8", "--repeats", "1"]
NANO = ["--models", "vittt_nano_patch4_32", "--repeats", "1", "--memory-runs", "1"]


@pytest.fixture(autouse=True)
def _few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of this machine are no matter here, and take a second or more each time."""
    monkeypatch.setattr("vision_ttt.bench.rates._TURNS", 2)


def test_models_to_csv_and_table(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    table = tmp_path / "models.csv"
    threads = torch.get_num_threads()
    argv = ["bench", "models", *NANO, "--resolutions", "32", "64", "--threads", "1"]
    argv += ["--output", str(table)]
    assert main(argv) == 0
    assert torch.get_num_threads() == threads
    said = capsys.readouterr().out
    assert "vittt_nano_patch4_32" in said
    rows = read_rows(table)
    assert [row.resolution for row in rows] == [32, 64]
    assert rows[0].run.threads == 1
    assert all(row.product_macs_per_second > 0 for row in rows)
    assert "vision-ttt bench models --models vittt_nano_patch4_32" in rows[0].run.command


def test_train_prints_json(tmp_path: Path, capsys):
    output = tmp_path / "train.csv"
    argv = ["bench", "train", *NANO, "--resolutions", "32", "--output", str(output), "--json"]
    assert main(argv) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["measured"] == "training step"
    assert row["seconds"] == read_rows(output)[0].seconds


def test_default_output_is_named_after_command_and_device(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "ops", *SHAPE, "--backends", "dual"]) == 0
    rows = read_rows(tmp_path / "benchmarks" / "results" / "ops-cpu.csv")
    assert {row.contender for row in rows} == {"dual"}


def test_a_wrong_kernel_is_not_timed(tmp_path: Path, capsys, monkeypatch):
    dual = TABLE["ttt_linear"].backends["dual"]

    def wrong_forward(*args):
        o, *others = dual.forward(*args)
        return o + 0.01, *others

    monkeypatch.setitem(TABLE["ttt_linear"].backends, "hasty", dual._replace(forward=wrong_forward))
    output = tmp_path / "ops.csv"
    argv = ["bench", "ops", *SHAPE, "--output", str(output), "--backends", "hasty", "dual"]
    assert main(argv) == 1
    assert "'hasty' gives wrong results and is not timed: output o" in capsys.readouterr().err
    assert {row.contender for row in read_rows(output)} == {"dual"}


def test_what_was_measured_before_a_crash_is_kept(tmp_path: Path, monkeypatch):
    output = tmp_path / "models.csv"
    kept = []

    def append_then_stop(path, rows):
        append_rows(path, rows)
        kept.extend(rows)
        if kept:
            raise KeyboardInterrupt

    monkeypatch.setattr(bench_session, "append_rows", append_then_stop)
    argv = ["bench", "models", *NANO, "--resolutions", "32", "64", "--output", str(output)]
    assert main(argv) == 130
    assert [row.resolution for row in read_rows(output)] == [32]


def test_who_takes_too_long_is_left_out_and_shown(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    output = tmp_path / "models.csv"
    argv = ["bench", "models", *NANO, "--resolutions", "32", "64", "32", "--output", str(output)]
    assert main([*argv, "--max-seconds", "1e-9"]) == 0
    said = capsys.readouterr()
    assert "a call takes over 1e-09 s at 32²" in said.out
    assert "at 32² is not timed" in said.err
    assert [(row.resolution, row.seconds) for row in read_rows(output)] == [(32, None), (64, None)]


@pytest.mark.parametrize(
    ("argv", "more"),
    [
        (["models"], DEPLOYED),
        (["models", "--compile"], ()),
        (["train"], TRAINED),
    ],
)
def test_what_one_would_deploy_or_train_takes_part_by_default(argv, more, monkeypatch):
    asked = []

    def find_contenders(names):
        asked.extend(names)
        raise UserError("enough")

    monkeypatch.setattr(bench, "find_contenders", find_contenders)
    assert main(["bench", *argv]) == 2
    assert set(asked) == {*TINY, *more}


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["speed"], "speed"),
        (["dense"], "it must be one of ops, models, train"),
        (["models", "--models", "vittt_tinny_patch16_224"], "nearest: vittt_tiny_patch16_224"),
        (["models", "--dtype", "float16"], "accepted on cpu: float32, bfloat16"),
        (["models", "--resolutions", "0"], "at least 1"),
        (
            ["models", *NANO, "--resolutions", "32", "33"],
            "33 × 33 are not whole patches of 4 × 4",
        ),
        (["models", *NANO, "--resolutions", "3"], "images of 3 × 3 are not whole patches"),
        (["train", "--max-seconds", "0"], "max-seconds is 0"),
        (["models", *NANO, "--baseline", "deit"], "accepted: vittt_nano_patch4_32"),
        (["models", "--shape", "1"], "unknown flag --shape"),
        (["models", "--models", "deit_tiny_patch16_224:onnx"], "accepted: for_inference, inductor"),
        (["train", "--models", DEPLOYED[0]], "which is for bench models"),
        (["models", "--models", DEPLOYED[0], "--device", "cuda"], "is for --device cpu"),
        (["models", "--models", DEPLOYED[0], "--compile"], "is for models without --compile"),
        (["models", "--memory-runs", "-1"], "--memory-runs is -1"),
        (["train", "--repeats", "0"], "repeats is 0"),
        (["ops", "--backends", "fast"], "unknown backend 'fast'"),
        (
            ["ops", "--backends", "cpu", "--shape", "1", "9", "2", "17"],
            "'cpu' does not support this call",
        ),
        (
            ["ops", "--backends", "cpu", "--dtype", "float16"],
            "'cpu' does not support this call: dtype",
        ),
        (["ops", "--shape", "1", "0", "2", "16"], "tokens is 0"),
        (["ops", "--shape", "1", "9", "2", "0"], "dim is 0"),
        (["ops", "--lengths", "9", "-1"], "tokens is -1"),
    ],
)
def test_unsupported_choices_are_one_line(argv, told, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *argv]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())  # refused before anything is written


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(capsys):
    assert main(["bench", "models", "--device", "cuda"]) == 2
    assert "accepted: cpu" in capsys.readouterr().err


def test_help_of_each(capsys):
    for what, flag in {"ops": "--shape", "train": "--resolutions"}.items():
        with pytest.raises(SystemExit) as ended:
            main(["bench", what, "--help"])
        assert ended.value.code == 0
        assert flag in capsys.readouterr().out
