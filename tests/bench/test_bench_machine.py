"""What a row says of its machine and its source."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from vision_ttt.bench import machine


def test_a_run_is_described(monkeypatch: pytest.MonkeyPatch):
    for name in os.environ:
        if name not in ("PATH", "HOME"):
            monkeypatch.delenv(name)
    run = machine.describe_run(["vision-ttt", "bench", "a b"], torch.device("cpu"))
    assert run.command == "vision-ttt bench 'a b'"
    monkeypatch.setenv("VISION_TTT_BACKEND", "dual")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "a b")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setenv("EDITOR", "ed")
    run = machine.describe_run(["vision-ttt"], torch.device("cpu"))
    variables = "ATEN_CPU_CAPABILITY=avx2 MALLOC_ARENA_MAX='a b' VISION_TTT_BACKEND=dual"
    assert run.command == f"{variables} vision-ttt"
    assert run.torch == torch.__version__.partition("+")[0] or run.torch == torch.__version__
    assert run.threads == torch.get_num_threads()
    assert run.device_name == run.processor != ""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", run.started)


def _git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "src" / "machine.py"
    path.parent.mkdir()
    path.write_text("1")
    _git(tmp_path, "init")
    monkeypatch.setattr(machine, "__file__", str(path))
    return path


def test_commit_and_changes_since(source: Path):
    root = source.parents[1]
    _git(root, "add", ".")
    _git(root, "commit", "-m", "one")
    _git(root, "tag", "v1")  # the commit is wanted, whatever its name
    assert re.fullmatch("[0-9a-f]{40}", machine.commit())
    (root / "benchmarks.csv").write_text("a row of the former run")
    assert re.fullmatch("[0-9a-f]{40}", machine.commit())
    source.write_text("2")
    assert re.fullmatch("[0-9a-f]{40}-dirty", machine.commit())
    source.write_text("1")
    (source.parent / "new.py").write_text("not tracked yet, and imported all the same")
    assert re.fullmatch("[0-9a-f]{40}-dirty", machine.commit())


def test_a_repository_that_the_source_is_no_part_of_says_nothing(source: Path):
    root = source.parents[1]
    (root / "other").write_text("1")
    _git(root, "add", "other")
    _git(root, "commit", "-m", "one")
    assert machine.commit() == ""


def test_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.commit() == ""


class _Gpu:
    uuid = "4c0b-11"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make torch believe in a GPU; returns the place of its nvidia-smi, which is not there yet."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: _Gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "nvidia-smi"


def test_a_gpu_is_described(gpu: Path):
    gpu.write_text(
        "#!/bin/sh\n"
        "[ $1 = --id=GPU-4c0b-11 ] || exit 6\n"
        "echo '580.65, 345 MHz, 1980 MHz, 3201 MHz, 700.00 W'\n"
    )
    gpu.chmod(0o755)
    run = machine.describe_run(["vision-ttt", "bench"], torch.device("cuda"))
    assert (run.device_name, run.cuda, run.driver) == ("A GPU", "13.2", "580.65")
    assert run.clocks == "345 MHz of 1980 MHz, memory 3201 MHz, at most 700.00 W"
    assert run.triton == machine.installed("triton")
    assert run.processor == machine.processor_name()
    on_cpu = machine.describe_run(["vision-ttt", "bench"], torch.device("cpu"))
    assert on_cpu.cuda == on_cpu.driver == on_cpu.clocks == on_cpu.triton == ""


def test_nvidia_smi_may_fail(gpu: Path):
    gpu.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    gpu.chmod(0o755)
    assert machine.graphics_driver(torch.device("cuda")) == ("", "")


def test_installed():
    assert machine.installed("timm") != ""
    assert machine.installed("no-such-package") == ""
