"""Packages whose public names are imported when they are first used."""

import importlib
import sys
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

from vision_ttt.extras import require


def lazy_exports(
    package: str,
    homes: Mapping[str, str],
    *,
    submodules: Collection[str] = (),
    extra: str | None = None,
) -> None:
    """Give a package public names that are imported when they are first used.

    What is light in the package can then be imported without the rest. Import the same names under
    `typing.TYPE_CHECKING`, for readers and their tools.

    Args:
        package: its `__name__`, while it is being imported.
        homes: each name → the package's own module that defines it.
        submodules: modules of the package that are public names themselves.
        extra: the extra of vision-ttt that some of these modules need. Where one cannot be imported
            because packages of it are missing, :class:`vision_ttt.extras.MissingPackageError` is
            raised in place of Python's error.
    """
    module = sys.modules[package]
    vars(module)["_homes"] = {name: f"{package}.{home}" for name, home in homes.items()}
    vars(module)["_submodules"] = frozenset(submodules)
    vars(module)["_extra"] = extra
    module.__class__ = _LazyPackage


class _LazyPackage(ModuleType):
    _homes: Mapping[str, str]
    _submodules: Collection[str]
    _extra: str | None

    def __getattr__(self, name: str) -> Any:
        if name in self._submodules:
            return importlib.import_module(f"{self.__name__}.{name}")
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
        # Importing the module `train` would put it where the package has its function `train`.
        if not (isinstance(value, ModuleType) and name in self._homes):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._homes, *self._submodules})
