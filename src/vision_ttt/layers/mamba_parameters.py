"""What Mamba layers of one and of two directions share: sizes and initialisation."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def check_mamba_sizes(
    dt_range: tuple[float, float],
    dim: int,
    state: int,
    expand: int,
    conv_kernel_size: int,
    dt_rank: int,
) -> None:
    """Raise an error for an argument that no Mamba layer can be built with.

    Raises:
        ValueError: an argument is out of its range.
    """
    sizes = {
        "dim": dim,
        "state": state,
        "expand": expand,
        "conv_kernel_size": conv_kernel_size,
        "dt_rank": dt_rank,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if not 0 < dt_range[0] <= dt_range[1] < math.inf:
        raise ValueError(f"dt_range must be two ascending numbers above 0, got {dt_range}")


@torch.no_grad()
def reset_scan_parameters(layer: nn.Module) -> None:
    """Initialise the parameters around a layer's scan, of one direction or of two."""
    x_proj, dt_proj, dt_bias, rates, skip = _scan_parameters(layer)
    nn.init.uniform_(x_proj, -(layer.inner**-0.5), layer.inner**-0.5)
    nn.init.uniform_(dt_proj, -(layer.rank**-0.5), layer.rank**-0.5)
    smallest, largest = layer.dt_range
    dt = dt_bias.uniform_(math.log(smallest), math.log(largest)).exp()
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
    each = torch.arange(1, layer.state + 1, dtype=rates.dtype, device=rates.device)
    rates.copy_(each.log().expand_as(rates))
    skip.fill_(1)


def _scan_parameters(layer: nn.Module) -> tuple[Tensor, ...]:
    return layer.x_proj, layer.dt_proj, layer.dt_bias, layer.A_log, layer.D
