"""Parameters without weight decay."""

from __future__ import annotations

from torch import nn


def undecayed_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that layers of ``model`` exempt from weight decay.

    A layer names them in a method ``no_weight_decay() -> set[str]``, as timm's models do. timm's
    optimisers decay neither vectors nor biases anyway.
    """
    return {
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        if module is not model and hasattr(module, "no_weight_decay")
        for parameter in module.no_weight_decay()
    }
