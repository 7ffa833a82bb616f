"""The refusal of TorchScript, which does not support these models."""

from __future__ import annotations

from typing import NoReturn

import torch

_UNSUPPORTED = (
    "TorchScript (torch.jit.script, torch.jit.trace, torch.onnx.export with dynamo=False) cannot "
    "hold this model: it would fix its loops over tokens at one length; torch.export.export, "
    "torch.onnx.export (dynamo=True) and torch.compile can, and so can `vision-ttt export`"
)


class NotScriptable:
    """Base of models that raise an error where TorchScript scripts or traces them."""

    def __prepare_scriptable__(self) -> NoReturn:
        """The method that torch.jit.script calls first on each module.

        Raises:
            TypeError: always.
        """
        raise TypeError(_UNSUPPORTED)

    @staticmethod
    def _refuse_tracing() -> None:
        """Called in forward, because torch.jit.trace has no such method.

        Raises:
            TypeError: torch.jit.trace is running.
        """
        if torch.jit.is_tracing():
            raise TypeError(_UNSUPPORTED)
