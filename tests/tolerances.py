"""How far a result may be from its float64 reference, per dtype: one table for every test.

An error is max|got - wanted| / max|wanted|. For half precisions the inputs are rounded first, so
that only the arithmetic is judged.
"""

import torch
from torch import Tensor

FORWARD = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
}
GRADIENT = {
    torch.float64: 1e-10,
    torch.float32: 5e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 4e-3,
}


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """max|got - wanted| / max|wanted|; a NaN or infinity on one side only gives infinity."""
    assert got.shape == wanted.shape, f"{list(got.shape)} is not {list(wanted.shape)}"
    got, wanted = got.detach().double(), wanted.detach().double()
    if not torch.isfinite(got).all():
        return float("inf")
    scale = wanted.abs().max().clamp_min(1e-30)
    return ((got - wanted).abs().max() / scale).item()


def assert_close(got: Tensor, wanted: Tensor, tolerance: float, name: str = "") -> None:
    error = relative_error(got, wanted)
    assert error <= tolerance, f"{name}: relative error {error:.3g} > {tolerance:.3g}"
