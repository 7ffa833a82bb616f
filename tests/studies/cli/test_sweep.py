"""`python -m studies sweep`."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml

from studies.cli import sweep
from studies.main import main
from studies.sweeps import SWEEPS, lengths
from studies.sweeps.definition import (
    GivenSeconds,
    Panel,
    SameSeconds,
    ShareOfUpdates,
    Sweep,
    Variant,
)
from studies.sweeps.lengths import LENGTHS_FILE
from studies.sweeps.results import HISTORY, Result, read_results, write_results
from studies.sweeps.runs import run_all
from vision_ttt.bench.machine import describe_run
from vision_ttt.errors import UserError
from vision_ttt.recipes import resolve


@pytest.fixture
def tiny(tiny_fields, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(resolve(tiny_fields(epochs=2, warmup=0)).as_dict()))
    rows = (
        Variant("plain", {}, published=77.7, note="All of it"),
        Variant("bare", {"arguments": {"design": "ttt_layer"}}),
        Variant("wrong", {"arguments": {"num_heads": 5}}),
    )
    shown = Panel("A tiny panel", {"Plain": "plain", "Bare": "bare", "Wrong": "wrong"})
    own = Sweep("tiny", "Tiny rows", str(recipe), {}, rows, (shown,), "It proves nothing.", "%")
    monkeypatch.setitem(SWEEPS, "tiny", own)
    monkeypatch.chdir(tmp_path)
    return own


@pytest.fixture
def results() -> list[Result]:
    run = describe_run(["vision-ttt", "sweep", "tiny"], torch.device("cpu"))
    counts = (1, 1297, 500, 1234, 5_600_000)
    return [
        Result("tiny", row, seed, "a_model", "{}", *counts, 0.9, 0.3 + seed, 1.0, 2.5, run)
        for row in ("plain", "bare")
        for seed in (0, 1)
    ]


def test_rows_to_csv_table_figure_and_page(tiny, tmp_path, capfd):
    page = tmp_path / "page.md"
    page.write_text("<!-- bench:tiny -->\n<!-- /bench -->\n")
    argv = ["sweep", "tiny", "--rows", "plain", "bare", "--seeds", "3", "4", "--epochs", "1"]
    assert main([*argv, "--jobs", "2", "--page", str(page)]) == 0
    said, told = capfd.readouterr()
    assert "Bare" in said
    assert "It proves nothing." in said
    assert "plain, seed 3: test accuracy" in told
    rows = read_results(tmp_path / "runs" / "sweep-tiny" / "results.csv")
    assert [(row.row, row.seed) for row in rows] == [
        *(("plain", 3), ("plain", 4), ("bare", 3), ("bare", 4))
    ]
    assert {row.epochs for row in rows} == {1}
    assert "python -m studies sweep tiny --rows plain bare --seeds 3 4" in rows[0].run.command
    assert (tmp_path / "runs" / "sweep-tiny" / "tiny.png").stat().st_size > 10_000
    assert (tmp_path / "runs" / "sweep-tiny" / "bare" / "seed-4" / "last.safetensors").exists()
    assert "| Plain | plain |" in page.read_text()
    assert "77.7 |" in page.read_text()


def test_table_and_figure_are_made_again_from_the_csv(tiny, tmp_path, results, capsys):
    table, figure, page = (tmp_path / name for name in ("some.csv", "new/some.svg", "page.md"))
    write_results(table, results)
    page.write_text("before\n<!-- bench:tiny -->\nold\n<!-- /bench -->\nafter\n")
    argv = ["sweep", "tiny", "--table-only", "--results", str(table), "--figure", str(figure)]
    assert main([*argv, "--page", str(page)]) == 0
    assert "| Bare | bare |" in page.read_text()
    assert page.read_text().startswith("before\n")
    assert "old" not in page.read_text()
    assert page.read_text().endswith("after\n")
    assert figure.read_text().startswith("<?xml")
    assert not (tmp_path / "runs").exists()
    assert "Plain" in capsys.readouterr().out
    assert main([*argv[:3], "--results", "missing.csv"]) == 2
    assert "missing.csv" in capsys.readouterr().err


def test_missing_runs_alone_are_trained_and_join_the_others(tiny, tmp_path, results, capfd):
    table = tmp_path / "some.csv"
    write_results(table, results)  # plain and bare, seeds 0 and 1
    argv = ["sweep", "tiny", "--missing-only", "--results", str(table), "--epochs", "1"]
    assert main([*argv, "--rows", "bare", "plain", "--seeds", "1", "2", "--jobs", "1"]) == 0
    found = read_results(table)
    order = [("plain", 0), ("plain", 1), ("plain", 2), ("bare", 0), ("bare", 1), ("bare", 2)]
    assert [(result.row, result.seed) for result in found] == order
    assert [result for result in found if result.seed < 2] == results
    folder = tmp_path / "runs" / "sweep-tiny"
    assert sorted(folder.glob("*/seed-*")) == [folder / row / "seed-2" for row in ("bare", "plain")]
    assert "plain, seed 2: test accuracy" in capfd.readouterr().err
    assert main([*argv, "--table-only"]) == 2
    assert "leave out --missing-only" in capfd.readouterr().err


def test_a_picture_that_needs_other_rows_is_left_out(tiny, tmp_path, results, monkeypatch, capsys):
    def draw(*_):
        raise UserError("the picture needs results of plain")

    monkeypatch.setitem(SWEEPS, "tiny", dataclasses.replace(tiny, draw=draw))
    table = tmp_path / "some.csv"
    write_results(table, results)
    assert main(["sweep", "tiny", "--table-only", "--results", str(table)]) == 0
    said = capsys.readouterr()
    assert "Plain" in said.out
    assert "no picture: the picture needs results of plain" in said.err


def test_former_results_outlive_a_sweep_of_which_every_run_failed(
    tiny, tmp_path, results, monkeypatch
):
    monkeypatch.setattr(sweep, "run_all", lambda *_: [])
    table = tmp_path / "some.csv"
    write_results(table, results)
    assert main(["sweep", "tiny", "--rows", "bare", "--results", str(table)]) == 0
    assert read_results(table) == results


def test_missing_runs_of_another_length_are_refused(tiny, tmp_path, results, capfd):
    table = tmp_path / "some.csv"
    write_results(table, results)
    argv = ["sweep", "tiny", "--missing-only", "--results", str(table), "--epochs", "2"]
    assert main([*argv, "--rows", "plain", "--seeds", "2"]) == 2
    told = f"row 'plain' has 1 epochs in {table} and 2 here; give --epochs 1, or another file"
    assert told in capfd.readouterr().err
    assert read_results(table) == results


def test_a_missing_run_joins_the_others_when_it_ends(tiny, tmp_path, results, monkeypatch):
    def killed_after_one(tasks, *others):
        run_all(tasks[:1], *others)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "run_all", killed_after_one)
    table = tmp_path / "some.csv"
    write_results(table, results)
    argv = ["sweep", "tiny", "--missing-only", "--results", str(table), "--epochs", "1"]
    assert main([*argv, "--rows", "plain", "bare", "--seeds", "2"]) == 130
    found = read_results(table)
    assert [(result.row, result.seed) for result in found if result.seed == 2] == [("plain", 2)]
    assert [result for result in found if result.seed < 2] == results


def test_missing_runs_of_another_rows_seconds_take_them_from_the_file(
    tiny, tmp_path, results, monkeypatch
):
    timed = Variant("bare-seconds", tiny.by_name["bare"].changes, length=SameSeconds("plain"))
    rows = (tiny.by_name["plain"], tiny.by_name["bare"], timed)
    shown = Panel("All", {row.name: row.name for row in rows})
    monkeypatch.setitem(SWEEPS, "tiny", dataclasses.replace(tiny, rows=rows, panels=(shown,)))
    curve = {name: [3.0] for name in HISTORY}
    table = tmp_path / "some.csv"
    paces = {"plain": 1.0, "bare-seconds": 1.5}
    monkeypatch.setattr(lengths, "measure_paces", lambda configs: {n: paces[n] for n in configs})
    with_history = [dataclasses.replace(result, history=json.dumps(curve)) for result in results]
    write_results(table, with_history)
    argv = ["sweep", "tiny", "--missing-only", "--results", str(table), "--seeds", "0"]
    assert main([*argv, "--rows", "bare-seconds", "--jobs", "1"]) == 0
    (added,) = [result for result in read_results(table) if result.row == "bare-seconds"]
    assert added.curve["update"][-1] == 2  # those of three updates, at two thirds of the pace


def test_results_of_runs_that_are_not_asked_for_are_kept(tiny, tmp_path, results):
    table = tmp_path / "some.csv"
    write_results(table, results)  # plain and bare, seeds 0 and 1
    argv = ["sweep", "tiny", "--rows", "bare", "--seeds", "1", "--epochs", "1"]
    assert main([*argv, "--results", str(table)]) == 0
    found = read_results(table)
    assert [(result.row, result.seed) for result in found] == [
        (result.row, result.seed) for result in results
    ]
    assert found[:3] == results[:3]
    assert found[3] != results[3]  # trained again


def test_a_csv_file_without_results_is_told(tiny, tmp_path, capsys):
    write_results(tmp_path / "empty.csv", [])
    assert main(["sweep", "tiny", "--table-only", "--results", "empty.csv"]) == 2
    assert capsys.readouterr().err == "error: empty.csv holds no results; train some first\n"
    assert not (tmp_path / "runs").exists()


def test_an_unknown_panel_is_refused_before_anything_is_trained(tiny, tmp_path, capsys):
    output = tmp_path / "runs"
    assert main(["sweep", "tiny", "--panels", "al", "--output", str(output)]) == 2
    assert "no panel 'al'; accepted: A tiny panel" in capsys.readouterr().err
    assert not output.exists()


def test_results_of_another_sweep_are_not_replaced(tiny, tmp_path, results, capsys):
    others = [dataclasses.replace(result, sweep="other") for result in results]
    write_results(tmp_path / "others.csv", others)
    assert main(["sweep", "tiny", "--results", "others.csv"]) == 2
    assert "of sweep 'other' is not of tiny" in capsys.readouterr().err
    assert read_results(tmp_path / "others.csv") == others


@pytest.mark.slow
def test_a_failed_run_is_named_with_the_end_of_its_log(tiny, tmp_path, capfd):
    argv = ["sweep", "tiny", "--seeds", "0", "--epochs", "1", "--rows", "wrong", "bare"]
    assert main([*argv, "--jobs", "1"]) == 1
    told = capfd.readouterr().err
    assert "wrong, seed 0 failed with exit code 2; its log" in told
    assert "multiple of num_heads" in told
    rows = read_results(tmp_path / "runs" / "sweep-tiny" / "results.csv")
    assert [row.row for row in rows] == ["bare"]


def test_rows_of_another_rows_seconds_are_trained_after_it(tiny, tmp_path, monkeypatch, capfd):
    timed = Variant("bare-seconds", tiny.by_name["bare"].changes, length=SameSeconds("plain"))
    rows = (tiny.by_name["plain"], tiny.by_name["bare"], timed)
    shown = Panel("All", {row.name: row.name for row in rows})
    monkeypatch.setitem(SWEEPS, "tiny", dataclasses.replace(tiny, rows=rows, panels=(shown,)))
    argv = ["sweep", "tiny", "--seeds", "0", "--jobs", "1"]
    assert main([*argv, "--rows", "bare-seconds"]) == 2
    assert "row 'plain', which has no finished run" in capfd.readouterr().err
    assert main(argv) == 0
    folder = tmp_path / "runs" / "sweep-tiny"
    (length,) = json.loads((folder / LENGTHS_FILE).read_text()).values()
    results = {result.row: result for result in read_results(folder / "results.csv")}
    assert list(results) == ["plain", "bare", "bare-seconds"]
    assert length["updates"] == max(round(length["seconds"] / length["seconds_per_update"]), 1)
    assert results["bare-seconds"].curve["update"][-1] == length["updates"]
    written = (folder / "bare-seconds" / "seed-0" / "result.json").stat().st_mtime_ns
    assert main(argv) == 0  # nothing is trained again
    assert (folder / "bare-seconds" / "seed-0" / "result.json").stat().st_mtime_ns == written


def test_rows_start_from_another_rows_weights_and_make_a_share_of_its_updates(
    tiny, tmp_path, monkeypatch, capfd
):
    half = Variant("half", {}, length=ShareOfUpdates("plain", 0.5), start="plain")
    rows = (tiny.by_name["plain"], half)
    shown = Panel("All", {row.name: row.name for row in rows})
    own = dataclasses.replace(tiny, rows=rows, panels=(shown,))
    monkeypatch.setitem(SWEEPS, "tiny", own)
    argv = ["sweep", "tiny", "--seeds", "1", "--jobs", "1", "--patch-size", "8"]
    assert main([*argv, "--rows", "half"]) == 2
    told = capfd.readouterr().err
    assert "row 'half' follows from row 'plain', which has no finished run; train it, too" in told
    assert main(argv) == 0
    folder = tmp_path / "runs" / "sweep-tiny"
    results = {result.row: result for result in read_results(folder / "results.csv")}
    assert results["half"].curve["update"][-1] == results["plain"].curve["update"][-1] // 2
    assert json.loads(results["half"].model_args)["patch_size"] == 8
    weights = Path("runs", "sweep-tiny", "plain", "seed-1", "last.safetensors")
    assert f"starting from {weights}" in (folder / "half" / "seed-1" / "log.txt").read_text()
    assert main([*argv, "--list"]) == 0
    listed = capfd.readouterr().out
    assert "initial_weights=those of plain, updates=50% of those of plain" in listed
    assert main([*argv[:2], "--patch-size", "0"]) == 2
    assert "--patch-size is 0; it must be at least 1" in capfd.readouterr().err


def test_rows_of_given_seconds_are_timed_as_they_are_trained(tiny, monkeypatch, capsys):
    row = dataclasses.replace(tiny.by_name["plain"], length=GivenSeconds(3.0))
    own = dataclasses.replace(tiny, rows=(row,), panels=(Panel("All", {"Plain": "plain"}),))
    monkeypatch.setitem(SWEEPS, "tiny", own)
    timed, trained = [], []

    def measure(configs):
        timed.extend(configs.values())
        return {"plain": 1.5}

    monkeypatch.setattr(lengths, "measure_paces", measure)
    monkeypatch.setattr(sweep, "run_all", lambda tasks, *_: trained.extend(tasks) or [])
    argv = ["sweep", "tiny", "--seeds", "1", "--patch-size", "8"]
    assert main([*argv, "--epochs", "1"]) == 2
    told = "--epochs is 1, but the length of row 'plain' is 3 seconds; leave --epochs out"
    assert told in capsys.readouterr().err
    assert main(argv) == 0
    assert [config.model.arguments["patch_size"] for config in timed] == [8]
    assert [task.config.optimisation.updates for task in trained] == [2]


def test_failed_runs_that_another_rows_length_follows_from_are_told(tiny, monkeypatch, capfd):
    wrong = tiny.by_name["wrong"]
    rows = (wrong, dataclasses.replace(wrong, name="timed", length=SameSeconds("wrong")))
    shown = Panel("All", {row.name: row.name for row in rows})
    monkeypatch.setitem(SWEEPS, "tiny", dataclasses.replace(tiny, rows=rows, panels=(shown,)))
    assert main(["sweep", "tiny", "--seeds", "0", "--jobs", "1"]) == 2
    told = capfd.readouterr().err
    assert "wrong, seed 0 failed with exit code 2; its log" in told
    assert "row 'timed' follows from the seconds of row 'wrong', which has no finished run" in told


def test_ctrl_c_tells_how_to_go_on(tiny, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "run_all", interrupted)
    assert main(["sweep", "tiny"]) == 130
    assert "the same command continues" in capsys.readouterr().err


def test_list_prints_the_rows_with_what_each_changes(tiny, tmp_path, capsys):
    assert main(["sweep", "tiny", "--list"]) == 0
    said = capsys.readouterr().out
    assert "design=ttt_layer" in said
    assert "nothing" in said
    assert "A tiny panel" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--rows", "plan"], "no row 'plan'; nearest: plain"),
        (["--jobs", "0"], "jobs is 0"),
        (["--epochs", "0"], "epochs is 0"),
        (["--seeds", "-1"], "--seeds is -1"),
        (["--figure", "a.doc"], "its suffix must be one of"),
        (["--page", "missing.md"], "missing.md"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_trained(tiny, tmp_path, capsys, wrong, message):
    assert main(["sweep", "tiny", *wrong]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_unknown_sweeps_are_answered_with_the_known(capsys):
    assert main(["sweep", "ablation"]) == 2
    assert "ablation-digits" in capsys.readouterr().err
