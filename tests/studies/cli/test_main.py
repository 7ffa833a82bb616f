"""The command line of the studies: what help says, what is refused, and vision-ttt's commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from studies.main import COMMANDS, main
from studies.sweeps import SWEEPS, TITLES
from vision_ttt.cli.main import COMMANDS as LIBRARY

Said = pytest.CaptureFixture[str]
OWN = ("artefacts", "sweep", "deletion", "letters", "bench", "paths")
HUGE = "9" * 25
SWEEP = ["sweep", "ablation-digits"]
DELETION = ["deletion", "--table-only", "--results"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with what is not what it should be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    for name in ("images/dark", "images/light"):
        (tmp_path / name).mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.png")
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["sweeps"], "unknown command 'sweeps'; nearest: sweep"),
        *(([name, "--no-such-flag"], "unknown flag --no-such-flag") for name in OWN[:3]),
        *(([name], f"(see python -m studies {name} --help)") for name in OWN),
        (["bench", "table", "pipe"], "the table pipe is a named pipe"),
        (["bench", "table", "/dev/zero"], "the table /dev/zero is a device"),
        (["bench", "table", "binary.csv"], "binary.csv is no CSV file"),
        (["bench", "table", "other.csv"], "other.csv is no file of measurements"),
        (["bench", "table", "other.csv", "--page", "pipe"], "--page pipe is a named pipe"),
        ([*SWEEP, "--table-only", "--results", "pipe"], "the results pipe is a named pipe"),
        ([*SWEEP, "--table-only", "--results", "binary.csv"], "binary.csv is no CSV file"),
        ([*SWEEP, "--results", "other.csv"], "other.csv is no file of a sweep's results"),
        ([*SWEEP, "--page", "pipe"], "the page pipe is a named pipe"),
        ([*SWEEP, "--figure", "pipe.png"], "--figure pipe.png is a named pipe"),
        ([*SWEEP, "--output", "a.png"], "--output a.png cannot be made"),
        (["letters", "a.png"], "the folder a.png cannot be made: "),
        (["letters", "images"], "images holds no set of letters, but dark, light"),
        (["paths", "vim_nano_patch4_32"], "no images are given; name models, then images"),
        (["paths", "sample:digit-0"], "no models are given; name models, then images"),
        (["paths", "resnet18", "images"], "no image in the folder images"),
        (["paths", "resnet18", "sample:digit-0"], "a plain backbone of vision_ttt is needed"),
        (["paths", "resnet17", "sample:digit-0"], "resnet17"),
        (["paths", "resnet18", "sample:digit-0", "--draws", "0"], "--draws is 0"),
        (["paths", "resnet18", "a.png", "--figure", "pipe.png"], "--figure pipe.png is a named"),
        ([*SWEEP, "--jobs", HUGE], "at most 1,024"),
        ([*SWEEP, "--seeds", "0", "-1"], "--seeds is -1"),
        ([*DELETION, "other.csv"], "other.csv is no file of deletion and insertion"),
        ([*DELETION, "pipe"], "the results pipe is a named pipe"),
        ([*DELETION, "other.csv", "--points", "1"], "--points is 1; it must be at least 2"),
    ],
    ids=lambda each: " ".join(each)[:60] if isinstance(each, list) else "",
)
def test_refusals_are_one_line(folder: Path, argv: list[str], told: str, capsys: Said) -> None:
    before = {str(path): path.lstat().st_mtime for path in folder.rglob("*")}
    assert main(argv) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert not said.out
    assert {str(path): path.lstat().st_mtime for path in folder.rglob("*")} == before


def test_help_names_the_program(capsys: Said) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: python -m studies COMMAND")
    assert all(f"  {name} " in said for name in COMMANDS)
    for name in OWN:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        said = capsys.readouterr().out
        assert " ".join(said.split()).startswith(f"usage: python -m studies {name} ")


def test_the_commands_are_the_studies_and_those_of_vision_ttt() -> None:
    assert COMMANDS.keys() == {*OWN, "scenes", "equations", *LIBRARY}
    assert all(COMMANDS[name].module.startswith("studies.") for name in OWN)
    assert all(COMMANDS[name] is LIBRARY[name] for name in LIBRARY if name not in OWN)


def test_help_has_the_titles_of_the_sweeps() -> None:
    """They are told without importing the sweeps."""
    assert {name: SWEEPS[name].title for name in TITLES} == TITLES


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "studies", "sweep"]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 2
    assert "(see python -m studies sweep --help)" in done.stderr
