"""Imports point down: a package of `vision_ttt` imports only what stands below it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "vision_ttt"

TIERS = (
    {"_version", "errors", "shown_text"},
    {"environment", "extras", "file_kinds", "files", "freed_memory", "pretrained", "safe_console"},
    {"_lazy", "data", "ops"},
    {"inner"},
    {"layers"},
    {"models"},
    {"acceleration", "dense", "diffusion", "language"},
    {"explain"},
    {"engine"},
    {"convert", "export", "tasks", "whole"},
    {"recipes"},
    {"app", "bench"},
    {"demo_dense"},
    {"cli"},
    {"__init__", "__main__", "run"},
)
"""Packages and modules, from the lowest to the highest; those of one tier do not import each other.

The loop logs inner losses, so `explain` stands below `engine`.
"""

_LEVELS = {name: level for level, tier in enumerate(TIERS) for name in tier}
_NAMED = re.compile(r"vision_ttt\.(\w+)(?:\.\w+)*(?::\w+)?")
"""A module given as a string, as tables of what is imported later have it."""


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import, those within functions and for type checkers, too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{each.name}") for each in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = _NAMED.fullmatch(node.value)
            if named and named[1] in _LEVELS:
                yield node.lineno, node.value


def upward(package: str, source: str) -> list[str]:
    """The imports in the source of a package that do not point down."""
    found = []
    for line, name in imports(source):
        top, _, rest = name.partition(".")
        if not top:
            found.append(f"line {line}: {name} is relative")
        other = rest.partition(".")[0]
        if top != "vision_ttt" or not rest or other == package:
            continue
        # A name of the package itself, such as `vision_ttt.Vittt`, is for those that use it.
        if _LEVELS.get(other, len(TIERS)) >= _LEVELS[package]:
            found.append(f"line {line}: {package} imports {name}")
    return found


def modules() -> Iterator[tuple[str, Path]]:
    """Each module's package, or the module's own name beside the packages, and its file."""
    for file in sorted(SOURCE.rglob("*.py")):
        yield file.relative_to(SOURCE).parts[0].removesuffix(".py"), file


def test_every_import_points_down() -> None:
    seen = list(modules())
    assert {package for package, _ in seen} == set(_LEVELS)
    found = {
        str(file.relative_to(SOURCE)): wrong
        for package, file in seen
        if (wrong := upward(package, file.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_ops_import_of_torch_nn_the_functions_only() -> None:
    found = [
        f"{file.relative_to(SOURCE)}, line {line}: {name}"
        for package, file in modules()
        if package == "ops"
        for line, name in imports(file.read_text(encoding="utf-8"))
        if f"{name}.".startswith("torch.nn.") and not name.startswith("torch.nn.functional")
    ]
    assert found == []


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("layers", "from vision_ttt.models import Vittt"),
        ("layers", "def late():\n    import vision_ttt.models.vittt"),
        ("engine", "from vision_ttt import tasks"),
        ("engine", "TABLE = {'language': 'vision_ttt.tasks.language.config:LanguageSection'}"),
        ("bench", "from vision_ttt.app import page"),
        ("models", "from vision_ttt import for_inference"),
        ("ops", "from ..layers import TTTLinear"),
    ],
)
def test_an_import_that_points_up_is_found(package: str, source: str) -> None:
    assert len(upward(package, source)) == 1


def test_an_import_that_points_down_is_none() -> None:
    source = "import vision_ttt.ops.linear\nfrom vision_ttt import inner\nfrom torch import nn"
    assert upward("layers", source) == []
