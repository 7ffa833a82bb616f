"""Calls of `ttt_linear` to be measured: their inputs and their arithmetic."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vision_ttt.ops import ttt_linear


class Problem(NamedTuple):
    """Shapes of a call: B · T tokens in H heads of width d, mini-batches of b."""

    batch: int
    tokens: int
    heads: int
    dim: int
    mini_batch_size: int
    shared: bool = False
    """The case that flash-linear-attention computes too: all heads scan forwards, one learning rate
    for all tokens. Otherwise a Vittt block's: half the heads scan backwards, one rate per token."""

    @property
    def case(self) -> str:
        """What a row says of it."""
        return "all heads forwards, one learning rate" if self.shared else ""

    def inputs(
        self, dtype: torch.dtype, device: torch.device | str, *, requires_grad: bool
    ) -> dict[str, Tensor]:
        """Fresh random tensor arguments of the op, with inner norm and position scale.

        The views q, k, v [B, T, H, d] have the given dtype, the others float32 (float64 where the
        views do). η is uniform in [0, 1/d], as a Vittt block's; in the shared case it is 1/(2d),
        and all but the state has values that the views' dtype has.
        """
        full = torch.promote_types(dtype, torch.float32)
        place = {"dtype": full, "device": device}
        batch, tokens, heads, dim, mini_batch_size, shared = self
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
        if shared:
            tensors["eta"] = torch.full((batch, tokens, heads), 0.5 / dim, **place)
            for name in ("eta", "ln_weight", "ln_bias", "position_scale"):
                tensors[name] = tensors[name].to(dtype).to(full)
        return {name: x.requires_grad_(requires_grad) for name, x in tensors.items()}

    def options(self, backend: str | None) -> dict[str, int | str | None]:
        """The op's other arguments."""
        return {
            "mini_batch_size": self.mini_batch_size,
            "reverse_heads": 0 if self.shared else self.heads // 2,
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
