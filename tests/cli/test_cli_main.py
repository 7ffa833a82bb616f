"""The command line's frame: dispatch, flags, one-line errors, exit codes."""

import subprocess
import sys
from pathlib import Path
from typing import Literal, TextIO

import jsonargparse
import pytest

from vision_ttt.cli import main as cli
from vision_ttt.errors import Interrupted, UserError


class _Command:
    """Stands for a command's module."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.arguments: jsonargparse.Namespace | None = None

    def add_arguments(self, parser: cli.CommandParser) -> None:
        parser.add_argument("--some_switch", type=bool, default=False)
        parser.add_argument("--count", type=int, default=1)
        parser.add_argument("--sizes", type=dict[str, int], default={})
        parser.add_argument("--layers", type=int | Literal["all"] | None, default=None)
        parser.add_argument("rest", nargs="*", type=str)

    def run(self, arguments: jsonargparse.Namespace) -> int:
        self.arguments = arguments
        if self.error is not None:
            raise self.error
        return 0


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> _Command:
    module = _Command()
    monkeypatch.setattr(cli, "COMMANDS", {"work": cli.Command("a.module", "do work")})
    monkeypatch.setattr(cli.importlib, "import_module", lambda _name: module)
    return module


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("train", "eval", "predict", "models", "demo"))
    assert cli.main([]) == 2
    assert cli.main(["--version"]) == 0
    assert "vision-ttt 0" in capsys.readouterr().out


def test_flags_may_be_spelt_both_ways_and_switches_bare(command: _Command) -> None:
    argv = ["work", "--some-switch", "a", "--count=3", "--sizes.x", "2", "-1"]
    assert cli.main(argv[:-1]) == 0
    arguments = command.arguments
    assert (arguments.some_switch, arguments.count, arguments.rest) == (True, 3, ["a"])
    assert arguments.sizes == {"x": 2}
    assert cli.main(["work", "--some_switch", "false"]) == 0
    assert command.arguments.some_switch is False


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["wrok"], "unknown command 'wrok'; nearest: work"),
        (["work", "--cuont", "3"], "unknown flag --cuont; nearest: --count"),
        (["work", "--ss", "3"], "unknown flag --ss; nearest: --some-switch"),
        (["work", "--count", "many"], "--count is 'many'; it must be a whole number"),
        (["work", "--count", "9" * 5000], "--count is too long; it must be a whole number"),
        (["work", "--count"], "expected one argument"),
        (["work", "--some_switch=perhaps"], "--some-switch is 'perhaps'; it must be true or false"),
        (["work", "a", "--some-switch", "perhaps"], "--some-switch is 'perhaps'; it must be true"),
        (["work", "--some_swich"], "nearest: --some-switch"),
        (["work", "--layers", "x"], "'x'; it must be a whole number or all or null"),
        (["work", "--sizes", "3"], "--sizes is '3'; it must be names with values"),
        (["work", "--sizes.a", "b"], "--sizes is"),
        (["work", "--count.a", "1"], "unknown flag --count.a"),
        (["work", "--sizes.", "1"], "unknown flag --sizes."),
        (["work", "--rest", "a"], "unknown flag --rest; give the rest without it"),
    ],
)
@pytest.mark.usefixtures("command")
def test_wrong_arguments_are_one_line(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert said.err.startswith("error:")
    assert len(said.err.splitlines()) == 1
    assert not said.out


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (UserError("[bold] is [not] markup " + "long " * 60), 2, "[bold] is [not] markup"),
        (FileNotFoundError(2, "No such file", "a/b"), 2, "a/b"),
        (UserError("in two\nlines"), 2, "in two lines"),
        (OSError(27, "File too large"), 2, "File too large"),
        (Interrupted("resume so"), 130, "resume so"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_of_the_user_have_no_traceback(
    command: _Command,
    error: BaseException,
    code: int,
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command.error = error
    assert cli.main(["work"]) == code
    said = capsys.readouterr().err
    assert told in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("error", [ValueError("ours"), OSError("about no file")])
def test_errors_of_ours_keep_their_traceback(command: _Command, error: Exception) -> None:
    command.error = error
    with pytest.raises(type(error)):
        cli.main(["work"])


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["work"]])
def test_a_command_ends_where_its_reader_has_gone(
    command: _Command, words: list[str], unread: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", unread)
    monkeypatch.setattr(command, "run", lambda _arguments: unread.write("unflushed"))
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 141


def test_installed_command_and_module_agree() -> None:
    script = Path(sys.executable).with_name("vision-ttt")
    said = [
        subprocess.run([*command, "eval"], capture_output=True, text=True, check=False)
        for command in ([str(script)], [sys.executable, "-m", "vision_ttt"])
    ]
    assert [each.returncode for each in said] == [2, 2]
    assert said[0].stderr == said[1].stderr
    assert "checkpoint" in said[0].stderr
