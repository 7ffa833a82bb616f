"""Inner models: functions of parameters and tokens, written for one head of one image.

An inner model is any callable ``model(params, x)`` that maps the tokens x [n, d] to predictions
[n, d]; ``params`` is one dictionary of tensors. The inner loop trains those in the ``state`` of the
:class:`~vision_ttt.inner.Learner`; the others are outer parameters, which it only reads. Row
vectors: ``x @ w + b``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

Params = dict[str, Tensor]
"""Parameters by name."""

Axes = Mapping[str, tuple[int, ...]]
"""Axes of parameters, by name."""


def _normal(*shape: int) -> Tensor:
    """Initial weights, distributed as in the fast layers."""
    return 0.02 * torch.randn(*shape)


class InnerModel(ABC):
    """Base class of inner models with an initial state; a Learner also accepts a bare function."""

    clip_axes: ClassVar[Axes] = {}
    """Soft clipping as in ViT³'s release: the axes of each parameter's norm."""
    mixes_tokens: ClassVar[bool] = False
    """Whether a token's prediction depends on other tokens; a causal scan does not support it."""

    @abstractmethod
    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Predictions [n, d] for the tokens x [n, d]."""

    @abstractmethod
    def initial_state(self, num_heads: int, head_dim: int) -> Params:
        """The parameters that the inner loop trains, per head: tensors [H, …]."""

    def outer_parameters(self, num_heads: int, head_dim: int) -> Params:
        """The parameters that only the outer loop trains, per head: tensors [H, …]."""
        return {}


@dataclass(frozen=True)
class Linear(InnerModel):
    """x w + b, TTT-Linear's inner model; without bias that of linear attention."""

    clip_axes: ClassVar[Axes] = {"w": (-2,)}
    bias: bool = True

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        z = x @ params["w"]
        return z + params["b"] if self.bias else z

    def initial_state(self, num_heads: int, head_dim: int) -> Params:
        state = {"w": _normal(num_heads, head_dim, head_dim)}
        if self.bias:
            state["b"] = torch.zeros(num_heads, head_dim)
        return state


@dataclass(frozen=True)
class MLP(InnerModel):
    """GELU(x w1 + b1) w2 + b2, TTT-MLP's inner model (TTT, Sec. 2.7), GELU in its tanh form."""

    clip_axes: ClassVar[Axes] = {"w1": (-2,), "w2": (-2,)}
    widening: int = 4

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        hidden = F.gelu(x @ params["w1"] + params["b1"], approximate="tanh")
        return hidden @ params["w2"] + params["b2"]

    def initial_state(self, num_heads: int, head_dim: int) -> Params:
        hidden = self.widening * head_dim
        return {
            "w1": _normal(num_heads, head_dim, hidden),
            "b1": torch.zeros(num_heads, hidden),
            "w2": _normal(num_heads, hidden, head_dim),
            "b2": torch.zeros(num_heads, head_dim),
        }


@dataclass(frozen=True)
class GatedLinearUnit(InnerModel):
    """((x w1) ⊙ SiLU(x w2)) w3: a gated linear unit with its output projection."""

    clip_axes: ClassVar[Axes] = {"w1": (-2,), "w2": (-2,), "w3": (-2,)}
    widening: int = 1

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        return ((x @ params["w1"]) * F.silu(x @ params["w2"])) @ params["w3"]

    def initial_state(self, num_heads: int, head_dim: int) -> Params:
        hidden = self.widening * head_dim
        return {
            "w1": _normal(num_heads, head_dim, hidden),
            "w2": _normal(num_heads, head_dim, hidden),
            "w3": _normal(num_heads, hidden, head_dim),
        }


@dataclass(frozen=True)
class SimplifiedGLU(InnerModel):
    """(x w1) ⊙ SiLU(x w2): ViT³'s F₁ (supplement, Sec. 3), without the output projection."""

    clip_axes: ClassVar[Axes] = {"w1": (-2,), "w2": (-2,)}

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        return (x @ params["w1"]) * F.silu(x @ params["w2"])

    def initial_state(self, num_heads: int, head_dim: int) -> Params:
        return {name: _normal(num_heads, head_dim, head_dim) for name in ("w1", "w2")}


@dataclass(frozen=True)
class DepthwiseConv3x3(InnerModel):
    """A 3×3 convolution of every channel on the grid of tokens: ViT³'s F₂, zero-padded, no bias.

    Args:
        grid: (h, w); the tokens of a batch are its h · w cells, row by row.
    """

    clip_axes: ClassVar[Axes] = {"w": (-2, -1)}
    mixes_tokens: ClassVar[bool] = True
    grid: tuple[int, int]

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        height, width = self.grid
        n, dim = x.shape
        if n != height * width:
            raise ValueError(f"{n} tokens do not fill a grid of {height} × {width}")
        image = F.pad(x.T.reshape(dim, height, width), (1, 1, 1, 1))
        kernel = params["w"][..., None, None]  # [d, 3, 3, 1, 1]
        # Nine shifted products, whose derivatives vmap supports without a special case.
        taps = (
            kernel[:, i, j] * image[:, i : i + height, j : j + width]
            for i in range(3)
            for j in range(3)
        )
        return sum(taps).reshape(dim, n).T

    def initial_state(self, num_heads: int, head_dim: int) -> Params:
        return {"w": _normal(num_heads, head_dim, 3, 3)}


@dataclass(frozen=True)
class NormedResidual(InnerModel):
    """x + LN(inner(x)), the norm and residual of TTT's inner models (Sec. 2.7).

    The norm's ``ln_weight`` and ``ln_bias`` are outer parameters.

    Args:
        inner: the wrapped model.
        eps: added to the norm's variance.
    """

    inner: InnerModel
    eps: float = 1e-6

    @property
    def clip_axes(self) -> Axes:
        return self.inner.clip_axes

    @property
    def mixes_tokens(self) -> bool:
        return self.inner.mixes_tokens

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        z = self.inner(params, x)
        centred = z - z.mean(-1, keepdim=True)
        normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)
        return x + normed * params["ln_weight"] + params["ln_bias"]

    def initial_state(self, num_heads: int, head_dim: int) -> Params:
        return self.inner.initial_state(num_heads, head_dim)

    def outer_parameters(self, num_heads: int, head_dim: int) -> Params:
        return {
            **self.inner.outer_parameters(num_heads, head_dim),
            "ln_weight": torch.ones(num_heads, head_dim),
            "ln_bias": torch.zeros(num_heads, head_dim),
        }
