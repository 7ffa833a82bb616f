"""The simplified gated linear unit as an inner model, and its gradient step in closed form."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vision_ttt.ops.swiglu import swiglu
from vision_ttt.ops.swiglu_mlp.matrix_products import parts, swiglu_backward, swiglu_gradient
from vision_ttt.ops.vit3_ttt.descent import (
    LOSS_SCALE,
    at_least_float32,
    softly_clipped,
    without_autocast,
)


def gated_unit(q: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """f(q) = q W₁ ⊙ SiLU(q W₂) per head, ViT³'s inner model F₁ (supplement, Sec. 3).

    Args:
        q: [B, T, H, d].
        w1: [B, H, d, d], or [H, d, d] for all images.
        w2: as w1.

    Returns:
        [B, T, H, d] in q's dtype; differentiable in all three.
    """
    weight = torch.cat((w2, w1), dim=-1).to(q.dtype)  # [B, H, d, 2 d], gate first as swiglu has it
    return swiglu(q.transpose(1, 2) @ weight).transpose(1, 2)


def gated_unit_step(
    k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, *, loss_scale: float = LOSS_SCALE
) -> tuple[Tensor, Tensor]:
    """One gradient step, of learning rate 1, on all tokens of an image at once.

    With f of :func:`gated_unit`, per image and head::

        L  = -(c / T) Σ_t ⟨f(k_t), v_t⟩                       supplement, Eq. 1; c is loss_scale
        W' = W - ∂L/∂W / (‖∂L/∂W‖ + 1)                        a norm for each output column

    and with z₁ = k W₁, z₂ = k W₂, σ the sigmoid of z₂::

        ∂L/∂W₁ = -(c / T) kᵀ (v ⊙ z₂ σ)
        ∂L/∂W₂ = -(c / T) kᵀ (v ⊙ z₁ ⊙ (σ + z₂ σ (1 - σ)))

    Args:
        k: [B, T, H, d].
        v: [B, T, H, d].
        w1: [H, d, d], the initial state of every image.
        w2: [H, d, d].
        loss_scale: c.

    Returns:
        W₁' and W₂', each [B, H, d, d], at least float32 also under autocast; differentiable in
        every tensor.
    """
    ascent = gated_unit_ascent(k, v, w1, w2)
    return gated_unit_after(ascent, k.shape[1], w1, w2, loss_scale=loss_scale)


def gated_unit_ascent(k: Tensor, v: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Σ_t ∂⟨f(k_t), v_t⟩/∂[W₂ W₁] of :func:`gated_unit_step`: [B, H, d, 2 d].

    Parts of an image may be summed one after the other, then :func:`gated_unit_after` steps.
    """
    w1, w2 = at_least_float32(w1, w2)
    with without_autocast(k):
        weight = torch.cat((w2, w1), dim=-1)  # [H, d, 2 d]
        return sum(_ascent(*_heads(k, v, part), weight) for part in _parts(k))


def gated_unit_after(
    ascent: Tensor, length: int, w1: Tensor, w2: Tensor, *, loss_scale: float = LOSS_SCALE
) -> tuple[Tensor, Tensor]:
    """W₁' and W₂' of :func:`gated_unit_step`, from the sum over all T = ``length`` tokens."""
    w1, w2 = at_least_float32(w1, w2)
    with without_autocast(ascent):
        weight = torch.cat((w2, w1), dim=-1)
        ascent = ascent * (loss_scale / length)
        w2, w1 = (weight + softly_clipped(ascent, -2)).chunk(2, dim=-1)
        return w1, w2


@torch.no_grad()
def gated_unit_gradient_norms(k: Tensor, v: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """‖∂L_t/∂[W₁ W₂]‖ of every token's share L_t of :func:`gated_unit_step`'s loss L = Σ_t L_t.

    The share of ∂L/∂W₁ is -(c / T) k_tᵀ (v_t ⊙ z₂ σ), a product of two vectors, and that of ∂L/∂W₂
    likewise: the norm is (c / T) ‖k_t‖ ‖g_t‖ with both second vectors side by side as g_t. It is
    taken before the step clips the sum.

    Args:
        k, v, w1, w2: as of :func:`gated_unit_step`.

    Returns:
        [B, T, H], at least float32.
    """
    w1, w2 = at_least_float32(w1, w2)
    with without_autocast(k):
        weight = torch.cat((w2, w1), dim=-1)  # [H, d, 2 d]
        norms = []
        for part in _parts(k):
            k_t, v_t = _heads(k, v, part)
            gradient = swiglu_backward(v_t, k_t @ weight)
            norms.append(k_t.norm(dim=-1) * gradient.norm(dim=-1))
        return torch.cat(norms, dim=-1).transpose(1, 2) * (LOSS_SCALE / k.shape[1])


def _ascent(k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """Σ_t ∂⟨f(k_t), v_t⟩/∂[W₂ W₁] [B, H, d, 2 d] over the tokens [B, H, t, d]."""
    gradient = swiglu_gradient if torch.is_grad_enabled() else swiglu_backward
    return k.mT @ gradient(v, k @ weight)


def _parts(x: Tensor) -> Iterable[slice]:
    """The chunks of the tokens of x [B, T, …]; training and graphs take all at once."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return (slice(None),)
    return parts(x, axis=1)


def _heads(k: Tensor, v: Tensor, part: slice) -> tuple[Tensor, ...]:
    """Tokens of k and v [B, T, H, d] as [B, H, t, d]."""
    return tuple(x.transpose(1, 2) for x in at_least_float32(k[:, part], v[:, part]))
