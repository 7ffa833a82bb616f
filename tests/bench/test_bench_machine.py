"""What a row says of its machine and its source."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from vision_ttt.bench import machine


def test_a_run_is_described():
    run = machine.describe_run(["vision-ttt", "bench", "a b"], torch.device("cpu"))
    assert run.command == "vision-ttt bench 'a b'"
    assert run.torch == torch.__version__.partition("+")[0] or run.torch == torch.__version__
    assert run.threads == torch.get_num_threads()
    assert run.device_name == run.processor != ""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", run.started)


def _git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "machine.py"
    path.write_text("1")
    _git(tmp_path, "init")
    monkeypatch.setattr(machine, "__file__", str(path))
    return path


def test_commit_and_changes_since(source: Path):
    _git(source.parent, "add", ".")
    _git(source.parent, "commit", "-m", "one")
    assert re.fullmatch("[0-9a-f]{40}", machine.commit())
    source.write_text("2")
    assert re.fullmatch("[0-9a-f]{40}-dirty", machine.commit())


def test_a_repository_that_the_source_is_no_part_of_says_nothing(source: Path):
    (source.parent / "other").write_text("1")
    _git(source.parent, "add", "other")
    _git(source.parent, "commit", "-m", "one")
    assert machine.commit() == ""


def test_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.commit() == ""
