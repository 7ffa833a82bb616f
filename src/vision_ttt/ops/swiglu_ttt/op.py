"""The public function of swiglu_ttt and its registration."""

from __future__ import annotations

import math

from torch import Tensor

from vision_ttt.ops._op import Op
from vision_ttt.ops._torch_function import overridable
from vision_ttt.ops.swiglu_ttt.contract import BACKWARD_CONTRACT, CONTRACT, Inputs
from vision_ttt.ops.swiglu_ttt.definition import swiglu_ttt_definition
from vision_ttt.ops.swiglu_ttt.matrix_products import BACKENDS


def _products(count: int, shapes: Inputs) -> int:
    """FLOPs of so many products of a token of each head with a matrix [d, d]."""
    return 2 * count * math.prod(shapes.q) * shapes.q[-1]


_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor w1, Tensor w2, Tensor w3"
OP = Op(
    "swiglu_ttt",
    Inputs,
    CONTRACT,
    swiglu_ttt_definition,
    BACKENDS,
    lambda inputs: inputs.q.new_empty(inputs.q.shape),
    schema=f"({_TENSORS}) -> Tensor",
    backward_schema=f"(Tensor grad, {_TENSORS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dw1, Tensor dw2, Tensor dw3)",
    backward_contract=BACKWARD_CONTRACT,
    autocast=("q", "k", "v"),
    flops=lambda shapes: _products(9, shapes),  # 3 to the loss, 3 of the step, 3 of the outputs
    backward_flops=lambda shapes: _products(29, shapes),  # 6 of the step, 8 of q, 15 of k and v
)


@overridable
def swiglu_ttt(q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Train a SwiGLU on all tokens by one gradient step, and apply it: [B, T, H, d] → the same.

    The inner model of "Linearizing Vision Transformers with Test-Time Training" (arXiv 2605.02772).
    Per image and head, with c = d^-½ / T and a step of size 1::

        f(x; W) = (SiLU(x W₁) ⊙ x W₂) W₃
        L(W)    = -c Σ_t ⟨f(k_t; W), v_t⟩
        W'      = W - ∂L/∂W
        o_t     = f(q_t; W')

    Every output depends on all tokens, whatever their order; cost and memory are linear in T. The
    step is computed in float32, or in float64 for tokens in it. The backward pass saves the
    arguments only and computes the step again.

    Args:
        q, k, v: [B, T, H, d], test, training and label views.
        w1, w2, w3: [H, d, d], the initial state of every image.

    Returns:
        [B, T, H, d] in q's dtype, differentiable in every tensor.

    Raises:
        TypeError: a dtype or type is not accepted.
        ValueError: the shapes do not fit each other.
    """
    return OP(Inputs(q, k, v, w1, w2, w3))
