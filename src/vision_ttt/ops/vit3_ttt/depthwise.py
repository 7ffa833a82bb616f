"""The depth-wise 3×3 convolution as an inner model, and its gradient step in closed form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._backend import written_out
from vision_ttt.ops.depthwise_conv2d import depthwise_conv2d
from vision_ttt.ops.vit3_ttt.descent import (
    LOSS_SCALE,
    at_least_float32,
    softly_clipped,
    without_autocast,
)
from vision_ttt.ops.vit3_ttt.op import depthwise_correlation


def depthwise(q: Tensor, w3: Tensor, grid: tuple[int, int]) -> Tensor:
    """Convolve each image with kernels of its own, ViT³'s inner model F₂ (supplement, Sec. 3).

    Args:
        q: [B, T, C], the tokens of a grid (h, w) row by row.
        w3: [B, C, K, K].
        grid: (h, w).

    Returns:
        [B, T, C] in q's dtype.
    """
    if written_out():
        return _shifted_products(q, w3.to(q.dtype), grid)
    weight = w3.flatten(0, 1).unsqueeze(1).to(q.dtype)  # [B · C, 1, K, K]
    out = depthwise_conv2d(_images_as_channels(q), weight, grid)  # [1, T, B · C]
    return out.view(q.shape[1], *q.shape[::2]).transpose(0, 1)


def depthwise_step(
    k: Tensor, v: Tensor, w3: Tensor, grid: tuple[int, int], *, loss_scale: float = LOSS_SCALE
) -> Tensor:
    """One gradient step, of learning rate 1, on all tokens of an image at once.

    Per image, channel and shift (i, j) of the kernel, with k zero beyond the edges::

        L  = -(c / T) Σ_t ⟨(w * k)_t, v_t⟩                    supplement, Eq. 1; c is loss_scale
        ∂L/∂w[i, j] = -(c / T) Σ_{r, s} k[r + i - 1, s + j - 1] v[r, s]
        w' = w - ∂L/∂w / (‖∂L/∂w‖ + 1)                        a norm for each channel's kernel

    Args:
        k: [B, T, C], the tokens of a grid (h, w) row by row.
        v: [B, T, C].
        w3: [C, 1, K, K], the initial state of every image.
        grid: (h, w).
        loss_scale: c.

    Returns:
        w' [B, C, K, K], at least float32 also under autocast; differentiable in every tensor.
    """
    ascent = depthwise_ascent(k, v, grid, w3.shape[-1])
    return depthwise_after(ascent, k.shape[1], w3, loss_scale=loss_scale)


def depthwise_ascent(k: Tensor, v: Tensor, grid: tuple[int, int], kernel_size: int) -> Tensor:
    """Σ_t ∂⟨(w * k)_t, v_t⟩/∂w of :func:`depthwise_step`: [B, C, K, K].

    Parts of an image may be summed one after the other, each with the rows of k around it and v
    zero there. :func:`depthwise_after` steps.
    """
    k, v = at_least_float32(k, v)
    with without_autocast(k):
        folded = (_images_as_channels(x) for x in (k, v))
        ascent = depthwise_correlation(*folded, grid, kernel_size)  # [B · C, 1, K, K]
        return ascent.view(k.shape[0], k.shape[2], kernel_size, kernel_size)


def depthwise_after(
    ascent: Tensor, length: int, w3: Tensor, *, loss_scale: float = LOSS_SCALE
) -> Tensor:
    """w' of :func:`depthwise_step`, from the sum over all T = ``length`` tokens."""
    ascent, w3 = at_least_float32(ascent, w3)
    with without_autocast(ascent):
        return w3.squeeze(1) + softly_clipped(ascent * (loss_scale / length), (-2, -1))


@torch.no_grad()
def depthwise_gradient_norms(
    k: Tensor,
    v: Tensor,
    grid: tuple[int, int],
    kernel_size: int,
) -> Tensor:
    """‖∂L_t/∂w‖ of every token's share L_t of :func:`depthwise_step`'s loss L = Σ_t L_t.

    The share of the token t = (r, s) is the loss of the output there, which depends on the K × K
    values of k around it. The loss is linear in w, and the norm the same at every state::

        ‖∂L_t/∂w‖² = (c / T)² Σ_channels v[r, s]² Σ_{i, j} k[r + i - 1, s + j - 1]²

    It is taken before the step clips the sum.

    Args:
        k, v, grid: as of :func:`depthwise_step`.
        kernel_size: K, odd.

    Returns:
        [B, T], at least float32.
    """
    k, v = at_least_float32(k, v)
    with without_autocast(k):
        ones = k.new_ones(k.shape[-1], 1, kernel_size, kernel_size)
        around = depthwise_conv2d(k.square(), ones, grid)  # [B, T, C]
        return (v.square() * around).sum(-1).sqrt() * (LOSS_SCALE / k.shape[1])


def _shifted_products(q: Tensor, w3: Tensor, grid: tuple[int, int]) -> Tensor:
    """:func:`depthwise` without B · C groups, which a Conv of ONNX cannot have for any B."""
    height, width = grid
    size = w3.shape[-1]
    reach = size // 2
    image = F.pad(q.unflatten(1, grid), (0, 0, reach, reach, reach, reach))  # [B, h + …, w + …, C]
    return sum(
        image[:, i : i + height, j : j + width] * w3[:, None, None, :, i, j]
        for i in range(size)
        for j in range(size)
    ).flatten(1, 2)


def _images_as_channels(x: Tensor) -> Tensor:
    """[B, T, C] → [1, T, B · C], so that one call convolves each image with kernels of its own."""
    return x.transpose(0, 1).flatten(1).unsqueeze(0)
