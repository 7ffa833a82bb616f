"""TorchScript cannot hold these models, and says so here rather than somewhere inside them."""

from __future__ import annotations

from typing import NoReturn

import torch

UNSUPPORTED = (
    "TorchScript (torch.jit.script, torch.jit.trace, torch.onnx.export with dynamo=False) cannot "
    "hold this model: it would fix its loops over tokens at one length; torch.export.export, "
    "torch.onnx.export (dynamo=True) and torch.compile can, and so can `vision-ttt export`"
)


class NotScriptable:
    """Base of models that refuse TorchScript."""

    def __prepare_scriptable__(self) -> NoReturn:
        """What torch.jit.script asks each module for first.

        Raises:
            TypeError: always.
        """
        raise TypeError(UNSUPPORTED)

    @staticmethod
    def _refuse_tracing() -> None:
        """To be called in forward: torch.jit.trace asks for nothing.

        Raises:
            TypeError: torch.jit.trace is at work.
        """
        if torch.jit.is_tracing():
            raise TypeError(UNSUPPORTED)
