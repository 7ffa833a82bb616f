"""What a wheel holds and is called, with the kernels and without.

The compiler is a stub that makes empty files: what it would compile is tested elsewhere.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUB = """#!/bin/sh
while [ "$#" -gt 0 ]; do
    [ "$1" = -o ] && mkdir -p "$(dirname "$2")" && : > "$2"
    shift
done
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the compiler is a shell script")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what a wheel is made from, with a library that a former version left."""
    folder = tmp_path / "sources"
    leavings = shutil.ignore_patterns("__pycache__", "*.egg-info", "_kernels.*")
    for name in ("src", "csrc", "studies", "tests/packaging"):
        shutil.copytree(ROOT / name, folder / name, ignore=leavings)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "src/vision_ttt/_kernels.cpython-310.so").touch()
    return folder


def _run(folder: Path, *command: str, compiler: str) -> str:
    environment = {**os.environ, "CC": compiler, "CXX": compiler}
    # There may be metadata of this package, which pip would take for the installed one.
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def _wheel(folder: Path, compiler: str) -> tuple[str, set[str], str]:
    """Build a wheel and return its tag, its files and what the build printed."""
    options = ("--no-build-isolation", "--no-deps", "--verbose", "--wheel-dir", "made")
    said = _run(folder, "-m", "pip", "wheel", *options, ".", compiler=compiler)
    (wheel,) = (folder / "made").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (described,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        tag = wheel.stem.split("-", 2)[2]
        assert f"Tag: {tag}\n" in archive.read(described).decode()
    wheel.unlink()
    return tag, names, said


def test_a_wheel_is_for_every_python(sources: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(STUB)
    compiler.chmod(0o755)
    tag, names, _ = _wheel(sources, str(compiler))
    assert tag.startswith("py3-none-linux_")
    tops = {name.split("/")[0].split("-")[0] for name in names}
    assert tops == {"vision_ttt", "vision_ttt_command.py"}
    compiled = {name for name in names if Path(name).suffix in (".so", ".o", ".cpp", ".h")}
    assert compiled == {"vision_ttt/_kernels.so"}
    own = {name for name in names if name.startswith("vision_ttt/pretrained/")}
    folder = ROOT / "src/vision_ttt/pretrained"
    data = {f"vision_ttt/pretrained/{file.name}" for file in folder.glob("*.*")}
    assert own == data
    assert any(name.endswith(".safetensors") for name in own)

    # Then without a compiler in the same tree: no wheel takes what was built before.
    (stale,) = sources.glob("build/lib*/vision_ttt/_kernels.so")
    stale.with_name("_kernels.cpython-310.so").touch()
    tag, without, said = _wheel(sources, "/nowhere/compiler")
    assert tag == "py3-none-any"
    assert without == names - {"vision_ttt/_kernels.so"}
    assert "the CPU kernels were not built" in said


def test_a_failed_build_in_the_sources_leaves_no_former_library(sources: Path) -> None:
    """It would run in place of the new one."""
    library = sources / "src/vision_ttt/_kernels.so"
    library.touch()
    said = _run(sources, "setup.py", "build_ext", "--inplace", compiler="/nowhere/compiler")
    assert "the CPU kernels were not built" in said
    assert not library.exists()


def test_the_source_distribution_holds_what_a_wheel_is_built_from(sources: Path) -> None:
    _run(sources, "setup.py", "-q", "sdist", compiler="/nowhere/compiler")
    (archive,) = (sources / "dist").glob("*.tar.gz")
    shutil.unpack_archive(archive, sources / "unpacked", filter="data")
    (unpacked,) = (sources / "unpacked").iterdir()

    for folder, pattern in (("csrc", "**/*.[ch]*"), ("src", "**/*.[pyj]*")):
        files = {file.relative_to(sources) for file in sources.glob(f"{folder}/{pattern}")}
        kept = {file.relative_to(unpacked) for file in unpacked.glob(f"{folder}/{pattern}")}
        assert len(files) > 10
        left_out = ("egg-info", "hypothesis")  # what tools leave in a tree
        assert not {file for file in files - kept if not any(x in str(file) for x in left_out)}
    pretrained = {file.name for file in sources.glob("src/vision_ttt/pretrained/*.*")}
    assert any(name.endswith(".safetensors") for name in pretrained)
    assert {file.name for file in unpacked.glob("src/vision_ttt/pretrained/*.*")} == pretrained
