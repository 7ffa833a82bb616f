"""The library knows nothing of the studies, and these use it as any other package does."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def imported(folder: Path) -> Iterator[tuple[str, str]]:
    """File and what it imports: modules, and names of modules as MODULE.NAME."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((str(file), each.name) for each in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((str(file), f"{node.module}.{each.name}") for each in node.names)


def test_the_library_imports_no_study() -> None:
    found = list(imported(ROOT / "src"))
    assert len(found) > 1000
    assert [each for each in found if each[1].partition(".")[0] == "studies"] == []


def test_the_studies_import_what_is_public() -> None:
    found = [each for each in imported(ROOT / "studies") if each[1].startswith("vision_ttt")]
    assert len(found) > 100
    assert [each for each in found if "._" in each[1]] == []
