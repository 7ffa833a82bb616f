"""Running a sweep: side by side, after faults, after being killed."""

import dataclasses
import math
import signal
import time
from pathlib import Path

import pytest
import torch

import forked_python
from studies.sweeps import runs
from studies.sweeps.norms import measure_norms
from studies.sweeps.one_run import Task
from studies.sweeps.results import RESULT_FILE, Result, finished
from studies.sweeps.runs import Failure, run_all
from studies.sweeps.tables import tabulate
from vision_ttt.engine import train
from vision_ttt.engine.locks import alone_in
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.errors import UserError
from vision_ttt.recipes import change, resolve

COMMAND = ("python", "-m", "studies", "sweep", "tiny")
KILLED_SWEEP = Path(__file__).with_name("killed_sweep.py")


def tasks_of(sweep, folder, seeds=(0, 1)):
    return [
        Task(sweep.name, row.name, sweep.config(row, seed, folder), COMMAND)
        for seed in seeds
        for row in sweep.rows
    ]


@pytest.mark.slow
def test_two_rows_with_two_seeds_are_trained_once(make_sweep, tmp_path, monkeypatch):
    sweep = make_sweep(plain={}, bare={"arguments": {"design": "ttt_layer"}})
    tasks = tasks_of(sweep, tmp_path / "runs")
    ended = []
    assert run_all(tasks, tmp_path / "runs", 2, lambda *each: ended.append(each)) == []
    assert {(task.row, task.config.run.seed) for task, _ in ended} == {
        *(("plain", 0), ("plain", 1), ("bare", 0), ("bare", 1))
    }
    results = {(result.row, result.seed): result for _, result in ended}
    assert all(isinstance(result, Result) for result in results.values())
    plain, bare = results["plain", 0], results["bare", 0]
    assert plain.parameters > bare.parameters
    assert plain.macs > bare.macs > 1e5
    assert plain.test_loss not in (bare.test_loss, results["plain", 1].test_loss)
    assert plain.run.threads == 1
    assert plain.run.command.endswith("python -m studies sweep tiny")
    assert (plain.train_images, plain.test_images, plain.epochs) == (16, 8, 1)

    assert plain.curve["update"] == [4]
    assert plain.curve["test_loss"] == [pytest.approx(plain.test_loss, rel=1e-4)]
    assert plain.curve["seconds"] == [pytest.approx(plain.seconds, rel=1e-4)]

    config = change(tasks[0].config, {"output": str(tmp_path / "alone")})
    alone = train(config).metrics
    for name in ("test_loss", "test_accuracy", "parameters"):
        assert getattr(plain, name) == pytest.approx(alone[name], rel=1e-5)
    assert plain.train_loss == pytest.approx(alone["history"][-1]["train_loss"], rel=1e-5)

    files = list((tmp_path / "runs").glob(f"*/*/{RESULT_FILE}"))
    written = {path: path.stat().st_mtime_ns for path in files}
    assert len(written) == 4
    monkeypatch.setattr(runs._Processes, "start", None)  # nothing is to be started
    again = []
    run_all(tasks, tmp_path / "runs", 2, lambda _task, result: again.append(result))
    assert again == [finished(task.config) for task in tasks]
    assert {path: path.stat().st_mtime_ns for path in files} == written


def test_what_the_sweep_examines_is_kept_with_seconds_that_add_up(make_sweep, tmp_path):
    sweep = make_sweep(plain={"epochs": 2})
    (task,) = tasks_of(sweep, tmp_path / "runs", seeds=(0,))
    (result,) = collected([dataclasses.replace(task, examine=measure_norms)], tmp_path / "runs")
    assert result.curve["epoch"] == [1, 2]
    assert result.curve["seconds"][1] == pytest.approx(result.seconds, rel=1e-4)
    shares, ratios, maps = result.measured.values()
    assert len(shares) == len(ratios) == 1  # of one block
    assert 0 <= shares[0] <= 1 <= ratios[0]
    maps = torch.tensor(maps)
    assert maps.shape == (4, 8, 8)
    assert torch.equal(maps.flatten(1).median(1).values, torch.ones(4))


def test_a_row_without_accuracy_has_losses_alone(make_sweep, tiny_fields, tmp_path):
    sweep = make_sweep(plain={})
    config = resolve(tiny_fields(task="masked-images", epochs=1))
    (result,) = collected(
        [Task("tiny", "plain", config, COMMAND, accuracy=None)], tmp_path / "runs"
    )
    assert math.isnan(result.test_accuracy)
    assert all(map(math.isnan, result.curve["test_accuracy"]))
    assert 0 < result.test_loss < 2
    headings, (line,) = tabulate(sweep, [finished(config)], 0)
    assert line[headings.index("test accuracy, %")] == ""


def collected(tasks, folder):
    results = []
    assert run_all(tasks, folder, 1, lambda _task, result: results.append(result)) == []
    return results


def test_a_failed_run_is_told_and_the_others_go_on(make_sweep, tmp_path):
    sweep = make_sweep(wrong={"arguments": {"num_heads": 5}}, right={})
    ended = []
    tasks = tasks_of(sweep, tmp_path / "runs", seeds=(0,))
    log = tmp_path / "runs" / "wrong" / "seed-0" / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text("of a former attempt\n" * 9)
    (failure,) = run_all(tasks, tmp_path / "runs", 1, lambda *each: ended.append(each))
    assert isinstance(failure, Failure)
    assert failure.task.row == "wrong"
    assert failure.exit_code == 2
    assert "multiple of num_heads" in failure.last_lines[-1]
    assert len(failure.last_lines) == 5
    assert failure.log == log
    assert [(task.row, type(outcome)) for task, outcome in ended] == [
        *(("wrong", Failure), ("right", Result))
    ]


def test_two_sweeps_do_not_share_a_folder(make_sweep, tmp_path):
    tasks = tasks_of(make_sweep(plain={}), tmp_path)
    with (
        alone_in(tmp_path, wait=False),
        pytest.raises(UserError, match=f"another sweep is at work in {tmp_path}"),
    ):
        run_all(tasks, tmp_path, 1, lambda *_: None)
    assert not (tmp_path / "plain").exists()


def test_an_interrupted_sweep_ends_its_runs_with_checkpoints(make_sweep, tmp_path):
    sweep = make_sweep(short={"epochs": 1}, long={"epochs": 500})
    tasks = tasks_of(sweep, tmp_path, seeds=(0,))

    def interrupt(task, _outcome):
        assert task.row == "short"
        wait_until(lambda: checkpoints(tmp_path / "long" / "seed-0"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(tasks, tmp_path, 2, interrupt)
    with alone_in(tmp_path / "long" / "seed-0", wait=False):  # its process has ended
        assert "stopped after update" in (tmp_path / "long" / "seed-0" / "log.txt").read_text()


@pytest.mark.slow
def test_a_killed_sweep_goes_on_where_it_was(make_sweep, tmp_path):
    sweep, output = make_sweep(short={"epochs": 1}, long={"epochs": 8}), tmp_path / "runs"
    long = output / "long" / "seed-0"
    with open(tmp_path / "said", "w") as file:
        command = [str(KILLED_SWEEP), sweep.recipe, str(output)]
        process = forked_python.start(command, stdout=file, stderr=file)
        wait_until(lambda: checkpoints(long) or process.poll() is not None)
        assert process.poll() is None, "the sweep ended before it could be killed"
        process.kill()
        assert process.wait(10) == -signal.SIGKILL
    with alone_in(long, wait=True):  # the run it left behind has ended
        assert not (long / RESULT_FILE).exists()
    wait_until(lambda: "stopped after update" in (long / "log.txt").read_text())
    short = (output / "short" / "seed-0" / RESULT_FILE).stat().st_mtime_ns

    ended = []
    tasks = tasks_of(sweep, output, seeds=(0,))
    assert run_all(tasks, output, 1, lambda _task, result: ended.append(result)) == []
    assert [(result.row, result.epochs) for result in ended] == [("short", 1), ("long", 8)]
    assert (output / "short" / "seed-0" / RESULT_FILE).stat().st_mtime_ns == short
    told = (long / "log.txt").read_text()
    assert [told.count(f"epoch {number}/8") for number in range(1, 9)] == [1] * 8


def wait_until(condition):
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
