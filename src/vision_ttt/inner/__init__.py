"""The design space of TTT: any inner model, loss, optimiser step and regime, by torch.func.

Tests compare the fast ops, which compute in closed form, with these definitions.
"""

from vision_ttt.inner.learner import Learner
from vision_ttt.inner.losses import (
    LOSSES,
    dot_product,
    mae,
    mse,
    rmse,
    smooth_l1,
    squared_error,
)
from vision_ttt.inner.models import (
    MLP,
    DepthwiseConv3x3,
    GatedLinearUnit,
    InnerModel,
    Linear,
    NormedResidual,
    SimplifiedGLU,
)

__all__ = [
    "Learner",
    "InnerModel",
    "Linear",
    "MLP",
    "GatedLinearUnit",
    "SimplifiedGLU",
    "DepthwiseConv3x3",
    "NormedResidual",
    "LOSSES",
    "dot_product",
    "mse",
    "rmse",
    "mae",
    "smooth_l1",
    "squared_error",
]
