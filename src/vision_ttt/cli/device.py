"""The device that a command's flag names."""

from __future__ import annotations

import re

import torch

from vision_ttt.errors import UserError


def find_device(name: str | None) -> torch.device:
    """Return the device of a name, e.g. "cuda:1"; for None a GPU if there is one.

    Raises:
        UserError: it cannot be used; names the accepted ones.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device).cpu()  # "meta" is no device to compute on
    # PyTorch without CUDA asserts, and looks for the modules of devices that others provide.
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = re.split(r"\. |\n", str(error).strip(), maxsplit=1)[0]
        raise UserError(
            f"device {name!r} cannot be used: {reason}; accepted here: {', '.join(_devices())}"
        ) from error
    return device


def _devices() -> list[str]:
    if not torch.accelerator.is_available():
        return ["cpu"]
    kind = torch.accelerator.current_accelerator().type
    return ["cpu", *(f"{kind}:{index}" for index in range(torch.accelerator.device_count()))]
