"""Inner models in the place of softmax attention: queries, keys, values [B, N, H, d] → the same.

Each is a module made by ``(dim, num_heads, head_dim)`` and called with the layer's input x
[B, N, D], its three views, the grid (h, w) and the positions of the tokens outside the grid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vision_ttt.layers.extra_tokens import merge_extra, split_extra
from vision_ttt.layers.gated_norm import GatedNorm
from vision_ttt.layers.inner_learner import LinearLearner
from vision_ttt.layers.residual_conv2d import ResidualConv2d
from vision_ttt.ops import swiglu_ttt
from vision_ttt.ops.vit3_ttt import depthwise, depthwise_step, gated_unit, gated_unit_step

for _name in ("swiglu_ttt", "depthwise", "depthwise_step", "gated_unit", "gated_unit_step"):
    torch.fx.wrap(_name)

Grid = tuple[int, int]
Positions = tuple[int, ...]

KEY_EPS = 1.0
"""Added to the variance of the keys, as in the released models."""


class SwiGLUInner(nn.Module):
    """A SwiGLU per head, trained by one gradient step on all tokens.

    "Linearizing Vision Transformers with Test-Time Training" (arXiv 2605.02772)::

        k ← (k - mean(k)) / √(var(k) + 1)           per image and channel, over the tokens
        q ← q + DWConv3×3(q), k ← k + DWConv3×3(k)  with bias, over all H d channels
        o = swiglu_ttt(q, k, v; W₁, W₂, W₃)         see :func:`vision_ttt.ops.swiglu_ttt`

    Tokens outside the grid train the inner model and query it as the others do, and count in the
    keys' mean and variance. The convolutions leave them out.

    Initialisation as in the release: states normal with standard deviation 0.02, convolutions
    PyTorch's default.
    """

    def __init__(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        width = num_heads * head_dim
        self.q_conv, self.k_conv = ResidualConv2d(width), ResidualConv2d(width)
        self.w1, self.w2, self.w3 = (
            _normal(torch.empty(num_heads, head_dim, head_dim)) for _ in range(3)
        )

    def no_weight_decay(self) -> set[str]:
        """The initial states of the inner models."""
        return {"w1", "w2", "w3"}

    def keys(self, k: Tensor, grid: Grid, extra: Positions) -> Tensor:
        """What the inner model is trained on, of the keys [B, N, H, d]."""
        normalised = _normalised(k.flatten(2))
        return _on_grid(self.k_conv, normalised, grid, extra).unflatten(-1, k.shape[2:])

    def forward(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, grid: Grid, extra: Positions
    ) -> Tensor:
        q = _on_grid(self.q_conv, q.flatten(2), grid, extra).unflatten(-1, v.shape[2:])
        return swiglu_ttt(q, self.keys(k, grid, extra), v, self.w1, self.w2, self.w3)


class TTTLinearInner(nn.Module):
    """TTT-Linear along the sequence in both directions (Vision-TTT), whose views are shared.

    The learning rates are computed from x as in :class:`vision_ttt.layers.TTTLinear`. The outputs
    of the directions are normalised, each by a LayerNorm of its own, and summed. Tokens outside
    the grid are in the sequence where they stand.

    Initialisation as of :class:`vision_ttt.layers.LinearLearner`; the rates' projection normal
    with standard deviation 0.02.
    """

    def __init__(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.rate_proj = nn.Linear(dim, 2 * num_heads)
        nn.init.trunc_normal_(self.rate_proj.weight, std=0.02)
        nn.init.zeros_(self.rate_proj.bias)
        self.learner = LinearLearner(num_heads, head_dim, directions=2)
        self.merge = GatedNorm(num_heads * head_dim, 2)

    def inner_problem(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        """The arguments of the learner's op."""
        return self.learner.problem(*self._views(x, q, k, v))

    def _views(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Of both directions, with the learning rates."""
        rates = self.rate_proj(x)
        rates = rates.to(torch.promote_types(rates.dtype, torch.float32)).sigmoid() / q.shape[-1]
        return (*(torch.cat((view, view), dim=2) for view in (q, k, v)), rates)

    def forward(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, grid: Grid, extra: Positions
    ) -> Tensor:
        z = self.learner(*self._views(x, q, k, v)).flatten(2)
        return self.merge(z).unflatten(-1, q.shape[2:])


class ViT3Inner(nn.Module):
    """ViT³'s inner models: a gated linear unit per head, and a depth-wise 3×3 convolution.

    See :class:`vision_ttt.layers.ViT3TTT`. The convolution's head has views of its own, which
    there are no weights to inherit for: its output [B, T, d] is projected to H d channels and
    added. Tokens outside the grid train the gated units and query them; the convolution leaves
    them out.

    Initialisation: normal with standard deviation 0.02; that projection zero.
    """

    def __init__(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.w1, self.w2 = (_normal(torch.empty(num_heads, head_dim, head_dim)) for _ in range(2))
        self.w3 = _normal(torch.empty(head_dim, 1, 3, 3))
        self.conv_qkv = nn.Linear(dim, 3 * head_dim)
        self.conv_proj = nn.Linear(head_dim, num_heads * head_dim, bias=False)
        nn.init.trunc_normal_(self.conv_qkv.weight, std=0.02)
        nn.init.zeros_(self.conv_qkv.bias)
        nn.init.zeros_(self.conv_proj.weight)

    def no_weight_decay(self) -> set[str]:
        """The initial states of the inner models."""
        return {"w1", "w2", "w3"}

    def conv_views(self, x: Tensor, extra: Positions) -> tuple[Tensor, ...]:
        """The convolution's query, key and value [B, h · w, d]."""
        return self.conv_qkv(split_extra(x, extra)[0] if extra else x).chunk(3, dim=-1)

    def forward(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, grid: Grid, extra: Positions
    ) -> Tensor:
        w1, w2 = gated_unit_step(k, v, self.w1, self.w2)
        o1 = gated_unit(q, w1, w2)
        q2, k2, v2 = self.conv_views(x, extra)
        o2 = self.conv_proj(depthwise(q2, depthwise_step(k2, v2, self.w3, grid), grid))
        if extra:
            o2 = merge_extra(o2, o2.new_zeros(x.shape[0], len(extra), o2.shape[-1]), extra)
        return o1 + o2.unflatten(-1, q.shape[2:])


INNER_MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "swiglu": SwiGLUInner,
    "ttt_linear": TTTLinearInner,
    "vit3": ViT3Inner,
}
"""Name → class, made by (dim, num_heads, head_dim)."""


def _normal(states: Tensor) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(states, std=0.02))


def _normalised(k: Tensor) -> Tensor:
    """k [B, N, C] less its mean over the tokens, and divided by its deviation."""
    wide = k.to(torch.promote_types(k.dtype, torch.float32))
    centred = wide - wide.mean(1, keepdim=True)
    variance = centred.square().mean(1, keepdim=True)
    return (centred * (variance + KEY_EPS).rsqrt()).to(k.dtype)


def _on_grid(conv: ResidualConv2d, x: Tensor, grid: Grid, extra: Positions) -> Tensor:
    """Convolve the tokens of x [B, N, C] that are on the grid; the others stay as they are."""
    if not extra:
        return conv(x, grid)
    image, others = split_extra(x, extra)
    return merge_extra(conv(image, grid), others, extra)
