"""How much each token contributes to the gradient step of swiglu_ttt."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops.swiglu import swiglu
from vision_ttt.ops.swiglu_mlp.matrix_products import parts, swiglu_backward
from vision_ttt.ops.swiglu_ttt.contract import CONTRACT, Inputs
from vision_ttt.ops.swiglu_ttt.matrix_products import by_shared, heads_of, initial
from vision_ttt.ops.vit3_ttt.descent import without_autocast


@torch.no_grad()
def swiglu_ttt_gradient_norms(k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """‖∂L_t/∂[W₁ W₂ W₃]‖ of every token's share L_t of swiglu_ttt's inner loss L = Σ_t L_t.

    With z = k_t [W₁ W₂], its gradient g_t, the hidden layer h_t and c = d^-½ / T, the share of each
    matrix's gradient is a product of two vectors, -c k_tᵀ g_t and -c h_tᵀ v_t. The norm is
    c √(‖k_t‖² ‖g_t‖² + ‖h_t‖² ‖v_t‖²).

    Args:
        k, v, w1, w2, w3: as of :func:`swiglu_ttt`.

    Returns:
        [B, T, H], at least float32.

    Raises:
        TypeError, ValueError: as of :func:`swiglu_ttt`.
    """
    inputs = Inputs(k, k, v, w1, w2, w3)
    CONTRACT.check(inputs)
    with without_autocast(k):
        up, down = initial(inputs)
        norms = []
        for part in parts(k, 1):
            keys, values = heads_of(k, part), heads_of(v, part)
            z = by_shared(keys, up)
            gradient = swiglu_backward(by_shared(values, down.mT), z)
            of_up = keys.norm(dim=-1) * gradient.norm(dim=-1)
            of_down = swiglu(z).norm(dim=-1) * values.norm(dim=-1)
            norms.append(torch.hypot(of_up, of_down))
        return torch.cat(norms, dim=-1).permute(1, 2, 0) * inputs.loss_scale()
