"""What a diffusion model is told beside the image: how noisy it is, and of which class."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

FREQUENCIES = 128


class TimestepEmbedding(nn.Module):
    """Linear SiLU Linear of sines and cosines of the time: t [B] → [B, D].

    The sinusoid is [cos(t f), sin(t f)] with f_i = 10000^(-i / 128), i = 0 … 127, in float32
    whatever the precision of the rest.

    Args:
        dim: D.

    Initialisation: weights normal with standard deviation 0.02, biases zero.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))
        for projection in (self.mlp[0], self.mlp[2]):
            nn.init.normal_(projection.weight, std=0.02)
            nn.init.zeros_(projection.bias)

    def forward(self, t: Tensor) -> Tensor:
        weight = next(self.mlp.parameters(), None)
        # Layers that are packed for inference have no parameters, and accept float32.
        return self.mlp(_sinusoid(t, torch.float32 if weight is None else weight.dtype))


@torch.fx.wrap
def _sinusoid(t: Tensor, dtype: torch.dtype) -> Tensor:
    precision = torch.promote_types(torch.float32, dtype)
    numbers = torch.arange(FREQUENCIES, device=t.device, dtype=precision)
    frequencies = torch.exp(-math.log(10_000) / FREQUENCIES * numbers)
    angles = t.to(precision)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


class LabelEmbedding(nn.Module):
    """A learned vector per class, and one for no class: y [B] → [B, D].

    While training, each label is dropped with probability ``dropout`` for the class
    ``num_classes``, which thereby comes to mean any class: classifier-free guidance (Ho and
    Salimans) asks for it.

    Args:
        num_classes: C.
        dim: D.
        dropout: without it (0) there is no vector for no class.

    Initialisation: normal with standard deviation 0.02.
    """

    def __init__(self, num_classes: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.dropout = dropout
        self.table = nn.Embedding(num_classes + (dropout > 0), dim)
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, y: Tensor) -> Tensor:
        if self.training and self.dropout > 0:
            # float32 whatever the default: few bits would round the probability.
            dropped = torch.rand_like(y, dtype=torch.float32) < self.dropout
            y = torch.where(dropped, self.num_classes, y)
        return self.table(y)
