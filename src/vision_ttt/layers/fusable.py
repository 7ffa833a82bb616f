"""The switch of layers that can run as one op: which parts it stands for, and what it refuses."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn


class Fusable(nn.Module):
    """A layer with a switch ``fused``, set when it is made: one op computes what some parts would.

    These parts then only hold parameters: they are not called, and hooks on them do not run. So one
    of them, or a method that is not called either, is replaced only after ``fused = False``, and a
    subclass that overrides such a method cannot be fused.

    Raises:
        ValueError: somebody assigns to such a name, or switches ``fused`` on afterwards.
        TypeError: ``fused`` is asked of a subclass that overrides such a method.
    """

    fused: bool
    fused_parts: ClassVar[tuple[str, ...]]
    fused_methods: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.__dict__["fused"] = False  # not assigned, which asks for it
        super().__init__()

    def fuse(self) -> None:
        """Switch the op on: for constructors, once all parts are there."""
        self._refuse_overrides(type(self))
        self.__dict__["fused"] = True  # assigned, it can only be switched off

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
        """Raise where the op would go on as if nothing had been assigned."""
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
        """The class whose methods the op stands for: the one that names them."""
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
    """Set ``fused`` to False in every layer of a model: it calls all of its parts from now on."""
    for module in model.modules():
        if isinstance(module, Fusable):
            module.fused = False
