"""What one has to say of a release so that it can be converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from vision_ttt.errors import UserError


class ConversionError(UserError, ValueError):
    """Weights that are not those of the model they were to be converted for."""


class Family(NamedTuple):
    """A release and the class of its models here."""

    name: str
    """As its authors call it."""
    model: type[nn.Module]
    """Our class."""
    hallmarks: frozenset[str]
    """Keys of the release that no other family's release has all of."""
    released_name: Callable[[str], str]
    """The release's key for a key of our state dict."""
    is_derived: Callable[[str, Tensor], bool] = lambda _key, _value: False
    """Whether a released tensor is one that our model computes for itself.

    Raises ConversionError where our model would compute another.
    """

    arguments: Callable[[Mapping[str, Tensor]], dict[str, Any]] = lambda _released: {}
    """Constructor arguments, in timm's words, that can be read off released weights."""

    diffusion: dict[str, Any] | None = None
    """Of a diffusion model the arguments of `vision_ttt.diffusion.make_process`."""

    def made(self, released: Mapping[str, Tensor]) -> bool:
        """Whether weights look like this family's."""
        return self.hallmarks <= released.keys()
