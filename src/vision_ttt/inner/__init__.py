"""The design space of TTT: any inner model, loss, optimiser step and regime, by torch.func.

What the fast ops compute in closed form is here by definition; tests hold them to it.
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
