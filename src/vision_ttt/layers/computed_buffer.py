"""A buffer that a module computes and state dicts lack."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound="ComputedBuffer")


def _compute(module: ComputedBuffer, _keys: object) -> None:
    """Compute the buffer after ``load_state_dict(…, assign=True)`` into a module on ``meta``."""
    module.init_non_persistent_buffers()


class ComputedBuffer(nn.Module, ABC):
    """A module whose buffer ``computed`` is a function of its settings and is not saved.

    The buffer is computed again, rather than rounded, after every move or cast, and after state
    dicts are loaded. Subclasses call :meth:`init_non_persistent_buffers` in their constructor.
    """

    computed: ClassVar[str]
    """The buffer's name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_compute)

    @abstractmethod
    def compute_buffer(self, device: torch.device | None) -> Tensor | None:
        """Return the buffer, or None if the module has no need of it."""

    def init_non_persistent_buffers(self) -> None:
        """Compute the buffer; timm calls it for models made on ``meta``."""
        buffer = self._buffers.get(self.computed)
        device = None if buffer is None else buffer.device
        # Only from meta to the parameters' device: while these are offloaded they are on meta, and
        # the buffer is not.
        if device is not None and device.type == "meta":
            places = [x.device for x in self.parameters()] or [torch.device("cpu")]
            device = next((place for place in places if place.type != "meta"), device)
        self.register_buffer(self.computed, self.compute_buffer(device), persistent=False)

    def _apply(self: Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
        super()._apply(fn, recurse)
        buffer = self._buffers[self.computed]
        if buffer is not None and not buffer.is_meta:
            self.init_non_persistent_buffers()
        return self
