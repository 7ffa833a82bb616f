"""Calls of `ttt_linear` to be measured: their inputs, their arithmetic, and who can serve them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vision_ttt.ops import ttt_linear
from vision_ttt.ops.ttt_linear.autograd import KERNELS


class Problem(NamedTuple):
    """Shapes of a call: B · T tokens in H heads of width d, mini-batches of b."""

    batch: int
    tokens: int
    heads: int
    dim: int
    mini_batch_size: int

    def inputs(
        self, dtype: torch.dtype, device: torch.device | str, *, requires_grad: bool
    ) -> dict[str, Tensor]:
        """Fresh random tensor arguments of the op, with inner norm and position scale.

        The views q, k, v [B, T, H, d] have the given dtype, the others float32 (float64 where the
        views do). η is uniform in [0, 1/d], as a Vittt block's.
        """
        full = torch.promote_types(dtype, torch.float32)
        place = {"dtype": full, "device": device}
        batch, tokens, heads, dim, mini_batch_size = self
        positions = torch.arange(1, mini_batch_size + 1, **place)
        tensors = {
            **{name: torch.randn(batch, tokens, heads, dim, **place).to(dtype) for name in "qkv"},
            "eta": torch.rand(batch, tokens, heads, **place) / dim,
            "w0": torch.randn(heads, dim, dim, **place) * 0.02,
            "b0": torch.randn(heads, dim, **place) * 0.02,
            "ln_weight": 1 + 0.1 * torch.randn(heads, dim, **place),
            "ln_bias": 0.1 * torch.randn(heads, dim, **place),
            "position_scale": 1 / positions,
        }
        return {name: x.requires_grad_(requires_grad) for name, x in tensors.items()}

    def options(self, backend: str | None) -> dict[str, int | str | None]:
        """The op's other arguments; half the heads scan backwards, as a Vittt block's do."""
        return {
            "mini_batch_size": self.mini_batch_size,
            "reverse_heads": self.heads // 2,
            "backend": backend,
        }

    def macs(self, *, backward: bool) -> int:
        """Multiply-adds of a call by the op's registered formula, whichever backend serves."""
        inputs = self.inputs(torch.float32, "meta", requires_grad=backward)
        with FlopCounterMode(display=False) as counter:
            o = ttt_linear(**inputs, **self.options("dual"))
            if backward:
                o.sum().backward()
        return counter.get_total_flops() // 2


def backends() -> list[str]:
    """Every backend that can be timed."""
    return [*KERNELS, "reference"]


def refusal(backend: str, problem: Problem, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a backend cannot serve the problem there, in a few words, or None if it can."""
    if backend == "reference":
        return None
    view = torch.empty(1, 1, 1, problem.dim, dtype=dtype, device=device)
    return KERNELS[backend].refusal(view, problem.mini_batch_size)
