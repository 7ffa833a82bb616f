"""The measured calls of the sequence ops: their inputs and multiply-adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vision_ttt.ops import selective_scan, ttt_linear, ttt_mlp

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "ttt_linear": ttt_linear,
    "ttt_mlp": ttt_mlp,
    "selective_scan": selective_scan,
}
"""Op of :data:`vision_ttt.bench.names.OPS` → its public function."""


class Problem(NamedTuple):
    """Shapes of a call of `op`: B · T tokens in H heads of width d, mini-batches of b.

    selective_scan has H · d channels with states of b numbers each.
    """

    batch: int
    tokens: int
    heads: int
    dim: int
    mini_batch_size: int
    op: str = "ttt_linear"
    shared: bool = False
    """Whether all heads scan forwards with one learning rate for all tokens, which other projects
    support, too. Otherwise the call is a Vittt or a Vim block's: half of the heads scan backwards,
    with a learning rate per token."""

    @property
    def case(self) -> str:
        """The text of a row's column "case"."""
        if self.op == "selective_scan" and self.shared:
            return "selective_scan, all channels forwards"
        if self.op != "ttt_linear":
            return self.op
        return "all heads forwards, one learning rate" if self.shared else ""

    @property
    def function(self) -> Callable[..., Tensor]:
        """The op's public function."""
        return FUNCTIONS[self.op]

    @property
    def channels(self) -> int:
        """H · d."""
        return self.heads * self.dim

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of the op's first result."""
        if self.op == "selective_scan":
            return self.batch, self.tokens, self.channels
        return self.batch, self.tokens, self.heads, self.dim

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the initial state's tensors."""
        heads, dim, hidden = self.heads, self.dim, 4 * self.dim
        if self.op == "ttt_linear":
            return {"w0": (heads, dim, dim), "b0": (heads, dim)}
        if self.op == "selective_scan":
            return {"h": (self.batch, self.channels, self.mini_batch_size)}
        return {
            "w1": (heads, dim, hidden),
            "b1": (heads, hidden),
            "w2": (heads, hidden, dim),
            "b2": (heads, dim),
        }

    def inputs(
        self, dtype: torch.dtype, device: torch.device | str, *, requires_grad: bool
    ) -> dict[str, Tensor]:
        """Fresh random tensor arguments of the op, with inner norm and position scale.

        The views q, k, v [B, T, H, d] have the given dtype, the others float32 (float64 where the
        views do). η is uniform in [0, 1/d], as a Vittt block's; in the shared case it is 1/(2d),
        and all but the state has values that the views' dtype has.

        Those of selective_scan are a Mamba layer's, with skip, gate and bias of δ: u, delta, z and
        the groups' B and C have the given dtype. A is that of a fresh layer, -1 … -N, and δ around
        0.05. In the shared case one B and C serve all channels, else each direction's half has its
        own.
        """
        if self.op == "selective_scan":
            scanned = self._scan_inputs(dtype, device)
            return {name: x.requires_grad_(requires_grad) for name, x in scanned.items()}
        full = torch.promote_types(dtype, torch.float32)
        place = {"dtype": full, "device": device}
        batch, tokens, heads, dim, mini_batch_size, _, shared = self
        positions = torch.arange(1, mini_batch_size + 1, **place)
        tensors = {
            **{name: torch.randn(batch, tokens, heads, dim, **place).to(dtype) for name in "qkv"},
            "eta": torch.rand(batch, tokens, heads, **place) / dim,
            **{
                name: torch.randn(*shape, **place) * 0.02
                for name, shape in self.state_shapes().items()
            },
            "ln_weight": 1 + 0.1 * torch.randn(heads, dim, **place),
            "ln_bias": 0.1 * torch.randn(heads, dim, **place),
            "position_scale": 1 / positions,
        }
        if shared:
            tensors["eta"] = torch.full((batch, tokens, heads), 0.5 / dim, **place)
            for name in ("eta", "ln_weight", "ln_bias", "position_scale"):
                tensors[name] = tensors[name].to(dtype).to(full)
        return {name: x.requires_grad_(requires_grad) for name, x in tensors.items()}

    def _scan_inputs(self, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
        batch, tokens, states = self.batch, self.tokens, self.mini_batch_size
        channels = self.channels
        full = torch.promote_types(dtype, torch.float32)
        place = {"dtype": full, "device": device}
        groups = () if self.shared else (2,)
        names = "u", "delta", "z"
        rows = {name: torch.randn(batch, tokens, channels, **place).to(dtype) for name in names}
        matrices = [
            torch.randn(batch, tokens, *groups, states, **place).to(dtype) for _ in range(2)
        ]
        return {
            "u": rows["u"],
            "delta": rows["delta"],
            "A": -torch.arange(1, states + 1, **place).repeat(channels, 1),
            "B": matrices[0],
            "C": matrices[1],
            "D": torch.randn(channels, **place),
            "z": rows["z"],
            "delta_bias": torch.full((channels,), -3.0, **place),
            "initial_state": torch.zeros(batch, channels, states, **place),
        }

    def options(self, backend: str | None) -> dict[str, int | str | None]:
        """The op's other arguments."""
        if self.op == "selective_scan":
            reverse = 0 if self.shared else self.channels // 2
            return {"delta_softplus": True, "reverse_channels": reverse, "backend": backend}
        return {
            "mini_batch_size": self.mini_batch_size,
            "reverse_heads": 0 if self.shared else self.heads // 2,
            "backend": backend,
        }

    def macs(self, *, backward: bool) -> int:
        """Multiply-adds of a call by the op's registered formula, the same for all backends."""
        inputs = self.inputs(torch.float32, "meta", requires_grad=backward)
        with FlopCounterMode(display=False) as counter:
            o = self.function(**inputs, **self.options("dual"))
            if backward:
                o.sum().backward()
        return counter.get_total_flops() // 2
