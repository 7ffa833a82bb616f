"""Models through timm, which makes them on a device and in a precision that are asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from timm.models import build_model_with_cfg
from torch import nn


def build_model(
    model_class: Callable[..., nn.Module],
    name: str,
    pretrained: bool,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **arguments: Any,
) -> Any:
    """timm's ``build_model_with_cfg``, and the ``device`` and ``dtype`` of timm's constructors.

    Args:
        model_class: what to build, or a function that does.
        name: of the model, by which timm finds its description.
        pretrained: load weights.
        device, dtype: where and in which precision parameters and buffers are made.
        arguments: the constructor's and timm's own; a wrong one raises TypeError.
    """

    def make(**constructor_arguments: Any) -> nn.Module:
        with nullcontext() if device is None else torch.device(device):
            model = model_class(**constructor_arguments)
        return model if dtype is None else model.to(dtype)

    return build_model_with_cfg(make, name, pretrained, **arguments)
