"""Text of others reaches terminals, tables and pages with its control characters shown."""

import ast
import io
import json
import logging
from pathlib import Path

import pytest
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from vision_ttt.cli.main import main
from vision_ttt.cli.plain_console import plain_console
from vision_ttt.engine.csv_text import csv_text
from vision_ttt.explain.report import PageTable, render_report
from vision_ttt.explain.report import Text as PageText
from vision_ttt.safe_console import SafeConsole
from vision_ttt.shown_text import shown

ROOT = Path(__file__).parents[1]
EVIL = "\x1b]0;evil\x07a\x9b31m\u202eb\r\x7f"
SHOWN = r"\u001b]0;evil\u0007a\u009b31m\u202eb\u000d\u007f"


def test_acting_characters_are_shown_and_others_left() -> None:
    assert shown(EVIL) == SHOWN
    text = "né, 猫 👩‍👩‍👧 [red] :cat:\n\tx"
    assert shown(text) == text
    assert json.loads(f'"{shown(EVIL)}"') == EVIL


@pytest.mark.parametrize("terminal", [False, True])
def test_whatever_is_printed(terminal: bool) -> None:
    file = io.StringIO()
    console = SafeConsole(
        file=file, force_terminal=terminal, width=200, markup=False, highlight=False
    )
    table = Table(EVIL, title=EVIL)
    table.add_row(EVIL)
    console.print(EVIL, table)
    assert file.getvalue().count(SHOWN) == 4  # those of the table measured as they are shown
    console.print(Text(EVIL, style="bold"))
    console.print_json(json.dumps([EVIL]))
    with Progress(TextColumn(EVIL, markup=False), console=console) as bar:
        bar.add_task("")
    told = file.getvalue()
    for character in "\x07\x9b\u202e\x7f":
        assert character not in told
    assert "\x1b]0" not in told
    assert ("\x1b[1m" in told) == terminal  # its own styles still act


def test_no_other_console_is_made() -> None:
    makers = []
    for file in (*ROOT.glob("src/**/*.py"), *ROOT.glob("studies/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rich"):
                makers += [file.name for each in node.names if each.name == "Console"]
    assert makers == ["safe_console.py"]
    assert isinstance(plain_console(), SafeConsole)


def test_errors_and_logs_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", f"{EVIL}.safetensors"]) == 2
    logging.getLogger("vision_ttt.x").warning("met %s", EVIL)
    told = capsys.readouterr().err
    assert told.count(r"\u001b]0;evil\u0007a\u009b31m") == 2
    assert "\x1b" not in told
    assert "\x9b" not in told


def test_tables_in_files_and_pages() -> None:
    assert csv_text(["a", "b"], [{"a": EVIL, "b": 1.5, "c": 0}]) == f"a,b\n{SHOWN},1.5\n"
    table = PageTable(EVIL, EVIL, [EVIL], [[EVIL]])
    page = render_report(
        EVIL, {EVIL: EVIL}, [], EVIL, [table], [PageText(EVIL, EVIL, f"<b>{EVIL}")]
    )
    assert page.count(SHOWN) == 12
    assert f"&lt;b&gt;{SHOWN}" in page
    assert not set(EVIL) - set("]0;evil a31mb") & set(page)
