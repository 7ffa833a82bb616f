"""`python -m studies bench`."""

import dataclasses
from pathlib import Path

import pytest

from bench_rows import DEIT, MODEL, VITTT, timed
from studies.main import main
from vision_ttt.bench.names import DEPLOYED
from vision_ttt.bench.rows import append_rows, read_rows

NANO = ["--models", "vittt_nano_patch4_32", "--repeats", "1"]


@pytest.fixture(autouse=True)
def _few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of this machine are no matter here, and take a second or more each time."""
    monkeypatch.setattr("vision_ttt.bench.rates._TURNS", 2)


@pytest.mark.slow
def test_lm_prints_how_models_compare(tmp_path: Path, capsys):
    pytest.importorskip("vision_ttt.language", exc_type=ImportError)
    output = tmp_path / "lm.csv"
    argv = ["bench", "lm", "--num_layers", "1", "--vocab_size", "64", "--contexts", "17"]
    argv += ["--decode_contexts", "17", "--decode_tokens", "2", "--train_contexts", "17"]
    argv += ["--batch_size", "1", "2"]
    assert main([*argv, "--repeats", "1", "--output", str(output)]) == 0
    said = capsys.readouterr().out
    assert "tokens per second at batch" in said
    assert "ttt-linear:for_inference, decode, 17 tokens: " in said
    assert "ttt-linear, training step, 17 tokens: " in said
    assert [row.measured for row in read_rows(output)] == [
        *["prefill"] * 2, *["decode"] * 3, *["training step"] * 4
    ] * 2  # fmt: skip


def test_dense_prints_the_adapters_share_and_names_its_output(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "dense", *NANO, "--sizes", "40x32"]) == 0
    assert "at 40×32: the adapter takes" in capsys.readouterr().out
    rows = read_rows(tmp_path / "studies" / "results" / "dense-cpu.csv")
    assert [row.measured for row in rows] == ["with adapter", "backbone alone"]
    assert "python -m studies bench dense --models" in rows[0].run.command


def test_a_table_is_printed_or_goes_into_a_page(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    table, page, picture = (tmp_path / name for name in ("models.csv", "page.md", "new.svg"))
    larger = dataclasses.replace(MODEL, resolution=448, seconds=None, failure="it takes too long")
    append_rows(table, [MODEL, dataclasses.replace(MODEL, resolution=320), larger])
    page.write_text("<!-- bench:models -->\n<!-- /bench -->\n")
    assert main(["bench", "table", str(table)]) == 0
    said = capsys.readouterr().out
    assert "| deit (fused attention) | 224² |" in said
    assert "| it takes too long |" in said
    argv = ["bench", "table", str(table), "--page", str(page), "--figure", str(picture)]
    assert main(argv) == 0
    assert "| deit (fused attention) | 320² |" in page.read_text()
    assert "tokens^" not in page.read_text()
    assert main([*argv, "--exponent", "224", "320"]) == 0
    assert "- deit (fused attention): time ~ tokens^" in page.read_text()
    assert picture.exists()


def test_a_headline_goes_into_a_page(tmp_path: Path, capsys):
    output, page = tmp_path / "models.csv", tmp_path / "README.md"
    append_rows(output, [timed(VITTT, 1.0), timed(f"{DEIT}:openvino", 3.0)])
    page.write_text("<!-- bench:headline -->\n<!-- /bench -->\n")
    argv = ["bench", "table", str(output), "--page", str(page), "--name", "headline"]
    assert main([*argv, "--headline", VITTT]) == 0
    said = page.read_text()
    assert f"One image of 224² pixels, float32: `{VITTT}` takes 1,000 ms, 3.00 times" in said
    assert main([*argv, "--headline", "absent"]) == 2
    assert f"'absent' is not measured; accepted: {VITTT}" in capsys.readouterr().err
    assert page.read_text() == said


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["models"], "it must be one of dense, lm, ops, table"),
        (["lm", "--contexts", "0"], "--contexts is 0; it must be at least 1"),
        (["lm", "--contexts", "--decode_contexts", "--train_contexts"], "nothing is measured"),
        (["lm", "--learners", "llama:for_inference"], "does not train"),
        (["lm", "--device", "cuda"], "'ttt-linear:for_inference' packs products on a CPU"),
        (["lm", "--dtype", "float16"], "float32 and bfloat16, got --dtype float16"),
        (["dense", "--sizes", "1333"], "write sizes as WIDTHxHEIGHT"),
        (["dense", "--sizes", "0x64"], "sides must be 1 to"),
        (["dense", "--models", DEPLOYED[0]], "bench dense accepts for_inference"),
        (["dense", "--models", f"{NANO[1]}:for_inference", "--compile"], "without --compile"),
        (["dense", "--models", "resnet18"], "model resnet18 cannot be built"),
        (["table", "absent.csv"], "absent.csv"),
        (["table", "rows.csv", "--exponent", "9", "9"], "the first must be the smaller"),
        (["table", "rows.csv", "--figure", "a.xyz"], "rows.csv"),
        (["table", "rows.csv", "--lines", *"abcdefg"], "--lines names 7 contenders"),
    ],
)
def test_unsupported_choices_are_one_line(argv, told, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *argv]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())  # refused before anything is written


def test_help_of_each(capsys):
    for what, flag in {
        "dense": "--sizes",
        "lm": "--readers",
        "ops": "--op",
        "table": "--page",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main(["bench", what, "--help"])
        assert ended.value.code == 0
        said = capsys.readouterr().out
        assert flag in said
        assert said.startswith(f"usage: python -m studies bench {what} ")
