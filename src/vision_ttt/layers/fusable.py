"""The switch ``fused`` of layers that can run as one op."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn


class Fusable(nn.Module):
    """A layer whose switch ``fused``, set on construction, replaces the calls of parts by one op.

    These parts then only hold parameters: they are not called, and hooks on them do not run.
    Replacing one of them, or a method that the op makes unnecessary, requires ``fused = False``
    first. A subclass that overrides such a method does not support ``fused``.

    Raises:
        ValueError: such a part or method is replaced, or ``fused`` is switched on after
            construction.
        TypeError: ``fused`` is set for a subclass that overrides such a method.
    """

    fused: bool
    fused_parts: ClassVar[tuple[str, ...]]
    """Names of the modules that the op replaces."""
    fused_methods: ClassVar[tuple[str, ...]] = ()
    """Names of the methods that the op replaces."""

    def __init__(self) -> None:
        self.__dict__["fused"] = False  # past __setattr__, which reads it
        super().__init__()

    def switch_on(self) -> None:
        """Switch the op on; constructors call it after all parts are assigned."""
        self._refuse_overrides(type(self))
        self.__dict__["fused"] = True  # past __setattr__, which only permits switching it off

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse_to_ignore(name, value)
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Assign a part."""
        self._refuse_to_ignore(name, module)
        super().add_module(name, module)

    def extra_repr(self) -> str:
        return "fused=True" if self.fused else ""

    def _refuse_to_ignore(self, name: str, value: Any) -> None:
        """Raise an error for an assignment that the op would ignore."""
        if name == "fused" and value and not self.fused:
            raise ValueError(f"{type(self).__name__}: fused can be switched off later, not on")
        if not self.fused:
            return
        if name in (*self.fused_parts, *self.fused_methods):
            raise ValueError(
                f"{type(self).__name__}: {name} is not called while fused is True, which makes one "
                f"op of {', '.join(self.fused_parts)}; set fused = False before replacing it"
            )
        if name == "__class__":
            self._refuse_overrides(value)

    @classmethod
    def _published(cls) -> type[Fusable]:
        """The class whose methods the op replaces: the one that defines ``fused_parts``."""
        return next(kind for kind in cls.__mro__ if "fused_parts" in vars(kind))

    @classmethod
    def _refuse_overrides(cls, kind: type) -> None:
        published = cls._published()
        for name in cls.fused_methods:
            if getattr(kind, name) is not getattr(published, name):
                raise TypeError(
                    f"{kind.__name__} overrides {name}, which is not called where fused is True"
                )


def unfuse(model: nn.Module) -> None:
    """Set ``fused`` to False in every layer of a model, which then calls all of its parts."""
    for module in model.modules():
        if isinstance(module, Fusable):
            module.fused = False
