"""The simplified gated linear unit as an inner model, and its gradient step in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops.swiglu import swiglu
from vision_ttt.ops.swiglu.contract import Inputs
from vision_ttt.ops.swiglu.op import OP as SWIGLU
from vision_ttt.ops.vit3_ttt.descent import (
    LOSS_SCALE,
    at_least_float32,
    softly_clipped,
    without_autocast,
)

TOKENS_AT_ONCE = 1024
"""Tokens of a chunk in inference on a CPU: small enough for the cache."""


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
        pairs = zip(_parts(k), _parts(v), strict=True)
        return sum(_ascent(*at_least_float32(*pair), weight) for pair in pairs)


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
        for pair in zip(_parts(k), _parts(v), strict=True):
            k_t, v_t = (x.transpose(1, 2) for x in at_least_float32(*pair))  # [B, H, t, d]
            gradient = _swiglu_gradient(k_t @ weight, v_t)
            norms.append(k_t.norm(dim=-1) * gradient.norm(dim=-1))
        return torch.cat(norms, dim=-1).transpose(1, 2) * (LOSS_SCALE / k.shape[1])


def _ascent(k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """Σ_t ∂⟨f(k_t), v_t⟩/∂[W₂ W₁] [B, H, d, 2 d] over the tokens [B, t, H, d]."""
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, H, t, d]
    return k.mT @ _swiglu_gradient(k @ weight, v)


def _swiglu_gradient(z: Tensor, v: Tensor) -> Tensor:
    """∂⟨swiglu(z), v⟩/∂z [B, H, t, 2 d] with z = [z₂ z₁]."""
    if not torch.is_grad_enabled() and SWIGLU.choose(Inputs(z)) == "cpu":
        return SWIGLU.backward_op(v, z)
    z2, z1 = z.chunk(2, dim=-1)
    gate = z2.sigmoid()
    silu = z2 * gate
    return torch.cat((v * z1 * (gate + silu * (1 - gate)), v * silu), dim=-1)


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """Tokens [B, T, …] in chunks."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not x.is_cpu:
        return (x,)
    return x.split(TOKENS_AT_ONCE, dim=1)
