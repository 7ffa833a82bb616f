"""The form in which the command runs a model that is only evaluated."""

from __future__ import annotations

import torch
from torch import nn

from vision_ttt.acceleration import for_inference


def fast_model(model: nn.Module, device: torch.device, dtype: str) -> tuple[nn.Module, str]:
    """The model to call on ``device``, and the precision that autocast is to be set to around it.

    On a CPU that is :func:`vision_ttt.for_inference`, which computes in ``dtype`` by itself.
    """
    if device.type == "cpu":
        return for_inference(model.cpu(), dtype=getattr(torch, dtype)), "float32"
    return model.to(device), dtype
