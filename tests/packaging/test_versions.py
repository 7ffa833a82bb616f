"""The command that runs the tests on several versions of PyTorch, without installing one."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKE = """#!/bin/sh
echo "== 30 passed, 2 skipped in 61.50s (0:01:01) =="
echo "{last}"
"""


@pytest.fixture
def versions(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "packaging")
    path = ROOT / "packaging/check_versions.py"
    spec = importlib.util.spec_from_file_location("check_versions", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def check(versions, monkeypatch, tmp_path):
    """Run the command where pip finds PyTorch 2.10.0 alone and make prints a line of pytest's."""
    pinned = []

    def make_environment(python, folder):
        (folder / "bin").mkdir(parents=True)
        return folder / "bin/python"

    def run(own, *command, **variables):
        if command[0] == "-c":
            return f"{pinned[-1].removeprefix('torch==')} 3.11.7"
        pinned.append(Path(variables["PIP_CONSTRAINT"]).read_text().strip())
        if pinned[-1] != "torch==2.10.0":
            raise SystemExit("no such version")
        assert command[-1].endswith("[dev]")
        return ""

    def check(last, *words):
        (tmp_path / "make").write_text(MAKE.format(last=last))
        (tmp_path / "make").chmod(0o755)
        versions.main([*words, "--python", sys.executable, "--output", str(tmp_path / "out")])

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(versions, "make_environment", make_environment)
    monkeypatch.setattr(versions, "run", run)
    return check


def rows(capsys):
    return [line.split() for line in capsys.readouterr().out.splitlines()[1:]]


def test_every_run_is_counted(check, capsys):
    check("== 5 passed in 1.02s ==", "--torch", "2.10.0")
    ((torch, python, passed, failed, _),) = rows(capsys)
    assert (torch, python, passed, failed) == ("2.10.0", "3.11.7", "35", "0")


@pytest.mark.parametrize(
    ("last", "counted"),
    [
        (
            "== 1 failed, 5 passed, 2 errors in 1.02s ==\nmake: [test] Error 1 (ignored)",
            ["35", "3"],
        ),
        ("make: [Makefile:21: test] Error 4 (ignored)", ["30", "0"]),
    ],
)
def test_a_failure_ends_with_1(check, capsys, tmp_path, last, counted):
    with pytest.raises(SystemExit, match="not every version passed"):
        check(last, "--torch", "2.10.0")
    assert rows(capsys)[0][2:4] == counted
    assert last in (tmp_path / "out/torch-2.10.0.txt").read_text()


def test_what_cannot_be_installed_does_not_keep_others_from_it(check, capsys, tmp_path):
    with pytest.raises(SystemExit, match="not every version passed"):
        check("== 5 passed in 1.02s ==", "--torch", "9.9.9", "2.10.0")
    missing, tested = rows(capsys)
    assert " ".join(missing) == "9.9.9 could not be installed"
    assert tested[2:4] == ["35", "0"]
    assert (tmp_path / "out/torch-9.9.9.txt").read_text() == "no such version\n"


def test_make_runs_the_tests_in_such_an_environment(tmp_path):
    """Without installing anew: the stamp that the command leaves is the one that make looks for."""
    (tmp_path / "bin").mkdir()
    for name in ("bin/python", ".installed-dev"):
        (tmp_path / name).touch()
    command = ("make", "--dry-run", "test", f"VENV={tmp_path}")
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"{tmp_path}/bin/python -m pytest" in said
    assert "pip install" not in said
