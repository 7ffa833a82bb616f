"""Run the default test suite on several versions of PyTorch::

    python packaging/check_versions.py [--python PYTHON] [--output DIR] --torch VERSION ...

For each version PYTHON makes a fresh environment, and pip installs this folder there with [dev] and
chooses the torchvision and the other requirements that go with the version. Then ``make test`` runs
there. The environment, of several GB, lies in the folder for temporary files and is removed; what
pip and the tests printed stays in DIR.

Prints a table, and exits with 1 where a version could not be installed or a test failed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from check_wheel import ROOT, make_environment, run

ROW = "{:<10} {:<10} {:>7} {:>7} {:>8}"
VERSIONS = "import platform, torch; print(torch.__version__, platform.python_version())"


def main(words: list[str] | None = None) -> None:
    """Check as the command line says."""
    parser = argparse.ArgumentParser(description="Run the tests on several versions of PyTorch.")
    parser.add_argument("--torch", nargs="+", required=True, metavar="VERSION")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--output", type=Path, default=ROOT / "runs/versions", metavar="DIR")
    given = parser.parse_args(words)
    python = shutil.which(given.python)
    if python is None:
        raise SystemExit(f"{given.python} is not a program")
    given.output.mkdir(parents=True, exist_ok=True)
    print(ROW.format("torch", "python", "passed", "failed", "seconds"), flush=True)
    fine = [
        check(version, python, given.output / f"torch-{version}.txt") for version in given.torch
    ]
    if not all(fine):
        raise SystemExit(f"not every version passed; {given.output} has what was printed")


def check(version: str, python: str, log: Path) -> bool:
    """Test a version of PyTorch, print its row and return whether nothing failed."""
    with tempfile.TemporaryDirectory() as temporary:
        try:
            own = install(version, Path(python).absolute(), Path(temporary))
        except SystemExit as refusal:
            log.write_text(f"{refusal}\n", encoding="utf-8")
            print(ROW.format(version, "", "", "", "") + "  could not be installed", flush=True)
            return False
        began = time.monotonic()
        fine = test(own, log)
        seconds = time.monotonic() - began
        names = run(own, "-c", VERSIONS).split()
    passed, failed = counts(log.read_text(encoding="utf-8"))
    print(ROW.format(*names, passed, failed, f"{seconds:.0f}"), flush=True)
    return fine and passed > 0


def install(version: str, python: Path, folder: Path) -> Path:
    """Install this project with a version of PyTorch and return the environment's Python.

    Raises:
        SystemExit: it cannot be installed.
    """
    own = make_environment(python, folder / "environment")
    only = folder / "constraint.txt"
    only.write_text(f"torch=={version}\n", encoding="utf-8")
    packages = ("--editable", f"{ROOT}[dev]")
    run(own, "-m", "pip", "install", *packages, PIP_CONSTRAINT=str(only))
    (own.parents[1] / ".installed-dev").touch()  # make need not install what is installed
    return own


def test(own: Path, log: Path) -> bool:
    """Run ``make test`` in an environment and return whether all of its runs ended well."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = ("make", "--ignore-errors", "test", f"VENV={own.parents[1]}")
    with open(log, "wb") as printed:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**kept, "LC_ALL": "C"},  # make says in English what it ignored
            stdout=printed,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return done.returncode == 0 and "(ignored)" not in log.read_text(encoding="utf-8")


def counts(printed: str) -> tuple[int, int]:
    """Return how many tests passed, and how many failed or had errors, as pytest says."""
    ends = re.findall(r"^=+ (.+) in [\d.]+s.* =+$", printed, re.MULTILINE)
    found = [pair for end in ends for pair in re.findall(r"(\d+) (\w+)", end)]
    passed = sum(int(n) for n, word in found if word == "passed")
    failed = sum(int(n) for n, word in found if word in ("failed", "error", "errors"))
    return passed, failed


if __name__ == "__main__":
    main()
