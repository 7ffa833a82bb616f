"""Triton's interpreter, made quick enough for tests."""

import inspect
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from vision_ttt.ops import _triton


@pytest.fixture(scope="session", autouse=True)
def _builtins_are_looked_up_once() -> Iterator[None]:
    """Look for the builtins of Triton's modules once; their number does not change.

    At each call of a function within a kernel, the interpreter goes through all members of these
    modules and replaces the builtins among them. That took 40 % of its time.
    """
    if not _triton.INTERPRETED:
        yield
        return
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    names: dict[int, list[str]] = {}

    def builtins_of(thing: object) -> list[tuple[str, object]]:
        if id(thing) not in names:
            members = inspect.getmembers(thing)
            names[id(thing)] = [name for name, member in members if is_builtin(member)]
        return [(name, getattr(thing, name)) for name in names[id(thing)]]

    with pytest.MonkeyPatch.context() as patch:
        quick = SimpleNamespace(**{**vars(inspect), "getmembers": builtins_of})
        patch.setattr(interpreter, "inspect", quick)
        yield
