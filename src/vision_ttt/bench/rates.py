"""The machine's peak rates: multiply-adds in registers, and the best matrix products."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from ctypes import c_int64
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vision_ttt.ops._native import LIBRARY

# Many short turns: on a shared machine some of them run undisturbed.
_TURNS = 30
_ROUNDS = 200_000
# Sizes of a product [tokens, channels] · [channels, channels].
_TOKENS, _CHANNELS = 1024, 768


class Rates(NamedTuple):
    """Multiply-adds per second with all of torch's threads; None where it is not known."""

    fma_macs_per_second: float | None = None
    """float32, in registers only: no kernel can be faster."""
    product_macs_per_second: float | None = None
    """The best available matrix product, float32."""
    bfloat16_product_macs_per_second: float | None = None
    """The best available matrix product, bfloat16."""


def measure_rates() -> Rates:
    """Measure the CPU for about a second; every rate is the best of several turns.

    The product is the faster of PyTorch's `F.linear` and of oneDNN's with packed weights, where
    PyTorch has the latter.
    """
    return Rates(fma_peak(), *(product_rate(dtype) for dtype in (torch.float32, torch.bfloat16)))


def fma_peak() -> float | None:
    """The float32 multiply-adds per second of the compiled kernels' instruction set.

    None where the kernels are missing.
    """
    if LIBRARY is None:
        return None
    run = LIBRARY.vision_ttt_fma_peak
    run.argtypes, run.restype = (c_int64, c_int64, ctypes.POINTER(ctypes.c_float)), c_int64
    threads, result = torch.get_num_threads(), ctypes.c_float()
    done = run(1, threads, result) * _ROUNDS
    return done / _shortest(lambda: run(_ROUNDS, threads, result))


def product_rate(dtype: torch.dtype) -> float:
    """The multiply-adds per second of the best product x · weightᵀ in `dtype`."""
    x, weight = (torch.randn(n, _CHANNELS).to(dtype) for n in (_TOKENS, _CHANNELS))
    with torch.inference_mode():
        products = [lambda: F.linear(x, weight)]
        packed = packed_product(x, weight)
        if packed is not None:
            products.append(packed)
        shortest = min(_shortest(product) for product in products)
    return _TOKENS * _CHANNELS**2 / shortest


def packed_product(x: Tensor, weight: Tensor) -> Callable[[], Tensor] | None:
    """The call of oneDNN's x · weightᵀ with a packed `weight`; None where PyTorch lacks it.

    The ops are private to PyTorch, so a first call checks that they work.
    """
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, x.shape[0])
        product = torch.ops.mkldnn._linear_pointwise
        product(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return None
    return lambda: product(x, packed, None, "none", [], "")


def _shortest(call: Callable[[], object]) -> float:
    shortest = math.inf
    for _ in range(_TURNS):
        start = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest
