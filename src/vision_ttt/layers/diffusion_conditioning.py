"""Embeddings of the timestep and the class label, on which a diffusion model is conditioned."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

FREQUENCIES = 128
"""Number of sinusoids of a timestep; each gives a sine and a cosine."""


class TimestepEmbedding(nn.Module):
    """Linear(SiLU(Linear(sinusoids(t)))): times t [B] → [B, D].

    The sinusoids are [cos(t f), sin(t f)] with f_i = 10000^(-i / 128), i = 0 … 127. They are
    computed in at least float32, whatever the precision of the projections.

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
    """A learned vector per class, and one for no class: labels y [B] → [B, D].

    In training each label is replaced by ``num_classes``, no class, with probability ``dropout``:
    classifier-free guidance (Ho and Salimans) requires a model that was trained on it.

    Args:
        num_classes: C.
        dim: D.
        dropout: probability of dropping a label; with 0 there is no vector for no class.

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
            # float32 whatever the default dtype: with few bits the probability would be rounded.
            dropped = torch.rand_like(y, dtype=torch.float32) < self.dropout
            y = torch.where(dropped, self.num_classes, y)
        return self.table(y)
