"""Packages that import what they offer when it is first asked for."""

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from vision_ttt.extras import require


def offer_late(package: str, homes: Mapping[str, str], extra: str | None = None) -> None:
    """Let a package offer names that are imported when they are first asked for.

    What is light in the package can then be imported without the rest. Say the same under
    `typing.TYPE_CHECKING`, for readers and their tools.

    Args:
        package: its `__name__`, while it is being imported.
        homes: each name → the package's own module that defines it.
        extra: the extra of vision-ttt that some of these modules need. Where one cannot be imported
            because packages of it are missing, :class:`vision_ttt.extras.MissingPackageError` is
            raised in place of Python's error.
    """
    module = sys.modules[package]
    vars(module)["_homes"] = {name: f"{package}.{home}" for name, home in homes.items()}
    vars(module)["_extra"] = extra
    module.__class__ = _LatePackage


class _LatePackage(ModuleType):
    _homes: Mapping[str, str]
    _extra: str | None

    def __getattr__(self, name: str) -> Any:
        if name not in self._homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        try:
            home = importlib.import_module(self._homes[name])
        except ModuleNotFoundError:
            if self._extra is not None:
                require(self._extra, f"{self.__name__}.{name}")
            raise
        value = getattr(home, name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing the module `train` would put it where the package offers its function `train`.
        if not (isinstance(value, ModuleType) and name in self._homes):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._homes})
