"""The description of a release from which its weights are converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from vision_ttt.errors import UserError


class ConversionError(UserError, ValueError):
    """Weights that cannot be read, or that do not fit the model they are converted for."""


class Family(NamedTuple):
    """A release and the class of its models here."""

    name: str
    """The authors' name of the architecture."""
    model: type[nn.Module]
    """The class of this library."""
    hallmarks: frozenset[str]
    """Keys that together occur in no other family's release."""
    released_name: Callable[[str], str | tuple[str, ...]]
    """Key of this library's state dict → the release's key, or the keys of the tensors that it
    consists of, one after the other along the first axis or along a new one before it."""
    is_derived: Callable[[str, Tensor], bool] = lambda _key, _value: False
    """(key, tensor) of the release → whether this library's model computes the tensor itself.

    Raises ConversionError where the model would compute another tensor.
    """

    arguments: Callable[[Mapping[str, Tensor]], dict[str, Any]] = lambda _released: {}
    """Released weights → the constructor arguments, in timm's names, that follow from them."""

    diffusion: dict[str, Any] | None = None
    """For a diffusion model the arguments of `vision_ttt.diffusion.make_process`."""

    other_parts: tuple[str, ...] = ()
    """Beginnings of the release's names of parts that the model does not have; they are dropped."""

    lacks: frozenset[str] = frozenset()
    """Keys of another family's release that also has this one's hallmarks."""

    prepared: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda released: released
    """Released weights → the same with tensors cut up that are several of this library's."""

    def made(self, released: Mapping[str, Tensor]) -> bool:
        """Whether the weights have all of the family's hallmarks."""
        return self.hallmarks <= released.keys() and self.lacks.isdisjoint(released)
