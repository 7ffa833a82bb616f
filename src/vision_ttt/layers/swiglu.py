"""The SwiGLU MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vision_ttt.layers.overwriting import may_overwrite
from vision_ttt.layers.plain_calls import is_plain
from vision_ttt.ops._backend import is_transformed
from vision_ttt.ops.swiglu import swiglu, swiglu_


class SwiGLU(nn.Module):
    """W₂ (SiLU(W_g x) ⊙ W_v x), without biases; gate and value come from one matrix product.

    The activation's output is not kept for the backward pass but computed again: that is cheap, and
    it is half as large as the pre-activations, the largest of a Vittt block's tensors.

    Args:
        dim: D.
        hidden: width of gate and value.

    Initialisation: normal with standard deviation 0.02.
    """

    TOKENS_AT_ONCE = 4096
    """Inference on a CPU takes so many at a time."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 2 * hidden, bias=False)
        self.fc2 = nn.Linear(hidden, dim, bias=False)
        for projection in (self.fc1, self.fc2):
            nn.init.trunc_normal_(projection.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        # Of a wrapper, or of what somebody watches, nothing is overwritten, split or run twice.
        plain = is_plain(self.fc1, nn.Linear) and is_plain(self.fc2, nn.Linear)
        if plain and may_overwrite():
            return self._infer(x)
        hidden = self.fc1(x)  # [..., 2 · hidden]
        # torch.compile decides for itself what to compute again; torch.func has no way to.
        transformed = torch.compiler.is_compiling() or is_transformed()
        if plain and hidden.requires_grad and not transformed:
            # It stops at fc2's input: the product itself is not repeated.
            return checkpoint(self._down, hidden, use_reentrant=False, preserve_rng_state=False)
        return self._down(hidden)

    def _infer(self, x: Tensor) -> Tensor:
        tokens = x.numel() // x.shape[-1]
        if x.device.type != "cpu" or tokens <= self.TOKENS_AT_ONCE:
            return self.fc2(swiglu_(self.fc1(x)))
        # A part's pre-activations stay near the cores, and in memory that the next part reuses:
        # the C library hands large blocks back to the system, page by page.
        parts = x.flatten(0, -2).split(self.TOKENS_AT_ONCE)
        return torch.cat([self.fc2(swiglu_(self.fc1(part))) for part in parts]).view(x.shape)

    def _down(self, hidden: Tensor) -> Tensor:
        return self.fc2(swiglu(hidden))
