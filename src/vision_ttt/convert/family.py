"""The description of a release from which its weights are converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from vision_ttt.errors import UserError


class ConversionError(UserError, ValueError):
    """Weights that cannot be read, or that do not fit the model they are converted for."""


def with_axes(released: Mapping[str, Tensor], name: str, axes: int) -> Tensor | None:
    """A released tensor; None if it is missing or has another number of axes.

    No argument follows from such a tensor; :func:`vision_ttt.convert.remap` names it.
    """
    tensor = released.get(name)
    return tensor if tensor is not None and tensor.ndim == axes else None


def number_of_classes(released: Mapping[str, Tensor], head: str) -> dict[str, int]:
    """``num_classes`` as a constructor argument, if the weight named ``head`` tells it."""
    weight = with_axes(released, head, 2)
    return {} if weight is None else {"num_classes": len(weight)}


class Family(NamedTuple):
    """A release and the class of its models here."""

    name: str
    """The authors' name of the architecture."""
    model: type[nn.Module] | str
    """The class of this library; its full name where importing it needs an extra's packages."""
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
    """Released weights → the same, with tensors split that are several tensors in this library."""

    fitting: Callable[[nn.Module], Family] | None = None
    """Model → the family with the names of its release, where they depend on its options."""

    def takes(self, model: nn.Module) -> bool:
        """Whether the model is of the family's class."""
        kind = type(model)
        if isinstance(self.model, str):
            return f"{kind.__module__}.{kind.__qualname__}" == self.model
        return kind is self.model

    def model_name(self) -> str:
        """The name of its class."""
        return self.model.rpartition(".")[2] if isinstance(self.model, str) else self.model.__name__

    def made(self, released: Mapping[str, Tensor]) -> bool:
        """Whether the weights have all of the family's hallmarks."""
        return self.hallmarks <= released.keys() and self.lacks.isdisjoint(released)
