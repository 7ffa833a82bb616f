"""Packages that import what they offer when it is first asked for."""

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def offer_late(package: str, homes: Mapping[str, str]) -> None:
    """Let a package offer names that are imported when they are first asked for.

    What is light in the package can then be imported without the rest. Say the same under
    `typing.TYPE_CHECKING`, for readers and their tools.

    Args:
        package: its `__name__`, while it is being imported.
        homes: each name → the package's own module that defines it.
    """
    module = sys.modules[package]
    vars(module)["_homes"] = {name: f"{package}.{home}" for name, home in homes.items()}
    module.__class__ = _LatePackage


class _LatePackage(ModuleType):
    _homes: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        if name not in self._homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(self._homes[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing the module `train` would put it where the package offers its function `train`.
        if not (isinstance(value, ModuleType) and name in self._homes):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._homes})
