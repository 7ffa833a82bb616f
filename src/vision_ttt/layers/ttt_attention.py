"""Softmax attention's projections around an inner model that is trained on the tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vision_ttt.layers.attention_inner import INNER_MODELS
from vision_ttt.layers.extra_tokens import merge_extra, split_extra
from vision_ttt.layers.grid import check_grid
from vision_ttt.layers.norm_precision import normalised

torch.fx.wrap("check_grid")


class TTTAttention(nn.Module):
    """A layer of linear cost in the place of a ViT's self-attention: [B, N, D] → [B, N, D].

    ::

        q, k, v = Linear(x)                 as of the attention, with its norms of q and k
        q, k    = rotated, where there are rotations
        o       = inner(q, k, v)            instead of softmax(q kᵀ) v
        out     = Linear(norm(o))

    Args:
        dim: D.
        num_heads: H.
        inner: the inner model, a key of :data:`vision_ttt.layers.attention_inner.INNER_MODELS`:
            "swiglu" (:class:`SwiGLUInner`), "ttt_linear" (:class:`TTTLinearInner`) or "vit3"
            (:class:`ViT3Inner`), which also say what tokens outside the grid mean to them.
        head_dim: d; by default D / H.
        qkv_bias, proj_bias: whether the projections have a bias.
        q_norm, k_norm: applied to each head of q and k [B, N, H, d].
        norm: applied to o [B, N, H d].
        rotate_half: channel i is rotated with channel i + d/2, instead of adjacent pairs.

    Raises:
        ValueError: D is no multiple of H, a size is below 1, or the inner model is unknown.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        inner: str = "swiglu",
        *,
        head_dim: int | None = None,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        norm: nn.Module | None = None,
        rotate_half: bool = False,
    ) -> None:
        super().__init__()
        if inner not in INNER_MODELS:
            raise ValueError(f"inner must be one of {list(INNER_MODELS)}, got {inner!r}")
        if num_heads < 1 or (head_dim is None and dim % num_heads):
            raise ValueError(f"dim must be a multiple of num_heads, got {dim} and {num_heads}")
        head_dim = dim // num_heads if head_dim is None else head_dim
        if min(dim, head_dim) < 1:
            raise ValueError(f"dim and head_dim must be at least 1, got {dim} and {head_dim}")
        self.num_heads, self.head_dim, self.rotate_half = num_heads, head_dim, rotate_half
        width = num_heads * head_dim
        self.qkv = nn.Linear(dim, 3 * width, bias=qkv_bias)
        self.q_norm = nn.Identity() if q_norm is None else q_norm
        self.k_norm = nn.Identity() if k_norm is None else k_norm
        self.inner = INNER_MODELS[inner](dim, num_heads, head_dim)
        self.norm = nn.Identity() if norm is None else norm
        self.proj = nn.Linear(width, dim, bias=proj_bias)
        for projection in (self.qkv, self.proj):
            nn.init.trunc_normal_(projection.weight, std=0.02)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(
        self,
        x: Tensor,
        grid: tuple[int, int],
        extra: tuple[int, ...] = (),
        rotations: Tensor | None = None,
    ) -> Tensor:
        """Mix.

        Args:
            x: [B, N, D] with N = h · w + len(extra).
            grid: (h, w).
            extra: positions in the sequence of the tokens outside the grid, ascending from 0.
            rotations: [h · w, 2 d], sines and cosines for each channel, as timm's rotary
                embeddings return them; applied to q and k of the tokens on the grid.

        Raises:
            ValueError: N does not fit the grid.
        """
        check_grid(x.shape[1], grid, len(extra))
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        q, k = normalised(self.q_norm, q), normalised(self.k_norm, k)
        if rotations is not None:
            q, k = (self._rotated(view, rotations, extra) for view in (q, k))
        o = self.inner(x, q, k, v, grid, extra)
        return self.proj(normalised(self.norm, o.flatten(2)))

    def _rotated(self, x: Tensor, rotations: Tensor, extra: tuple[int, ...]) -> Tensor:
        """x [B, N, H, d] with its tokens on the grid rotated."""
        sine, cosine = rotations.unsqueeze(1).chunk(2, dim=-1)  # [T, 1, d]
        image, others = split_extra(x, extra) if extra else (x, None)
        if self.rotate_half:
            first, second = image.chunk(2, dim=-1)
            turned = torch.cat((-second, first), dim=-1)
        else:
            first, second = image.unflatten(-1, (-1, 2)).unbind(-1)
            turned = torch.stack((-second, first), dim=-1).flatten(-2)
        image = (image * cosine + turned * sine).to(x.dtype)
        return image if others is None else merge_extra(image, others, extra)
