"""swiglu_ttt by PyTorch's matrix products, with the op swiglu between them.

The analytic backward pass saves the arguments only, and computes the step again. On a CPU the
tokens are processed in chunks, so that their hidden layers stay in the cache. The matrices of the
gate and the value are one, [W₁ W₂]: ``up`` [H, d, 2 d]; W₃ is ``down`` [H, d, d].
"""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._op import Backend
from vision_ttt.ops.swiglu import swiglu
from vision_ttt.ops.swiglu_mlp.matrix_products import parts, swiglu_backward
from vision_ttt.ops.swiglu_ttt.contract import Inputs


def _precision(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def heads_of(x: Tensor, part: slice) -> Tensor:
    """Tokens of x [B, T, H, d] as [H, B, t, d], at least float32."""
    return x[:, part].to(_precision(x)).permute(2, 0, 1, 3).contiguous()


def initial(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``up`` and ``down`` before the step."""
    wide = _precision(inputs.q)
    return torch.cat((inputs.w1, inputs.w2), dim=-1).to(wide), inputs.w3.to(wide)


def by_shared(x: Tensor, weight: Tensor) -> Tensor:
    """x [H, B, t, n] @ weight [H, n, m]: one product for the tokens of all images."""
    return (x.flatten(1, 2) @ weight).unflatten(1, x.shape[1:3])


def _shared_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient [H, n, m] of the weight of :func:`by_shared`."""
    return x.flatten(1, 2).mT @ grad.flatten(1, 2)


def _step(inputs: Inputs, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """``up`` [H, B, d, 2 d] and ``down`` [H, B, d, d] after the step."""
    scale = inputs.loss_scale()
    of_up, of_down = ascent(inputs.k, inputs.v, up, down)
    return tuple(
        torch.add(w.unsqueeze(1), of, alpha=scale) for w, of in ((up, of_up), (down, of_down))
    )


def ascent(k: Tensor, v: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """The sums Σ_t ∂⟨f(k_t), v_t⟩/∂W for ``up`` [H, B, d, 2 d] and ``down`` [H, B, d, d]."""
    of_up, of_down = (w.new_zeros(len(w), len(k), *w.shape[1:]) for w in (up, down))
    for part in parts(k, 1):
        keys, values = heads_of(k, part), heads_of(v, part)
        z = by_shared(keys, up)
        of_up += keys.mT @ swiglu_backward(by_shared(values, down.mT), z)
        of_down += swiglu(z).mT @ values
    return of_up, of_down


def outputs(q: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """f(q) [B, T, H, d] with each image's ``up`` [H, B, d, 2 d] and ``down`` [H, B, d, d]."""
    out = q.new_empty(q.shape)
    for part in parts(q, 1):
        out[:, part] = (swiglu(heads_of(q, part) @ up) @ down).permute(1, 2, 0, 3)
    return out


def _forward(inputs: Inputs) -> Tensor:
    return outputs(inputs.q, *_step(inputs, *initial(inputs)))


def _backward(inputs: Inputs, grad: Tensor) -> tuple[Tensor, ...]:
    up, down = initial(inputs)
    dq, dk, dv = (x.new_empty(x.shape) for x in inputs[:3])
    # Through the outputs to the weights after the step …
    new_up, new_down = _step(inputs, up, down)
    of_up, of_down = torch.zeros_like(new_up), torch.zeros_like(new_down)
    for part in parts(inputs.q, 1):
        q, g = heads_of(inputs.q, part), heads_of(grad, part)
        z = q @ new_up
        dz = swiglu_backward(g @ new_down.mT, z)
        dq[:, part] = (dz @ new_up.mT).permute(1, 2, 0, 3)
        of_up += q.mT @ dz
        of_down += swiglu(z).mT @ g
    # … and through the step, whose gradients are kᵀ p and hiddenᵀ v, to those before it.
    dup, ddown = of_up.sum(1), of_down.sum(1)
    of_up, of_down = (of.mul_(inputs.loss_scale()) for of in (of_up, of_down))
    for part in parts(inputs.k, 1):
        k, v = heads_of(inputs.k, part), heads_of(inputs.v, part)
        z1, z2 = by_shared(k, up).chunk(2, dim=-1)
        u, dhidden = by_shared(v, down.mT), v @ of_down.mT
        dp = k @ of_up
        hidden, du, p, dz = _through_step(z1, z2, u, dhidden, *dp.chunk(2, dim=-1))
        dk[:, part] = by_shared(dz, up.mT).add_(p @ of_up.mT).permute(1, 2, 0, 3)
        dv[:, part] = by_shared(du, down).add_(hidden @ of_down).permute(1, 2, 0, 3)
        dup += _shared_gradient(k, dz)
        ddown += _shared_gradient(du, v)
    dw1, dw2 = dup.chunk(2, dim=-1)
    weights = zip((dw1, dw2, ddown), inputs[3:], strict=True)
    return dq, dk, dv, *(x.to(w.dtype).contiguous() for x, w in weights)


def _through_step(
    z1: Tensor, z2: Tensor, u: Tensor, dhidden: Tensor, dp1: Tensor, dp2: Tensor
) -> tuple[Tensor, ...]:
    """What is between the matrix products of the step, and its gradients.

    The hidden layer is s z₂ with s = SiLU(z₁), and the gradient of [z₁ z₂] is p = [u z₂ s', u s].

    Args:
        z1, z2: [H, B, t, d].
        u: v W₃ᵀ.
        dhidden, dp1, dp2: gradients of the hidden layer and of both halves of p.

    Returns:
        The hidden layer, the gradient of u, p, and the gradient of [z₁ z₂].
    """
    p, dz = (u.new_empty(*u.shape[:-1], 2 * u.shape[-1]) for _ in range(2))
    (p1, p2), (dz1, dz2) = p.chunk(2, dim=-1), dz.chunk(2, dim=-1)
    gate = z1.sigmoid()
    silu, rest = z1 * gate, 1 - gate
    slope = torch.addcmul(gate, silu, rest)
    curve = torch.addcmul(gate + slope, silu, gate, value=-1).mul_(rest)  # SiLU''
    hidden = silu * z2
    uz2 = u * z2
    torch.mul(uz2, slope, out=p1)
    torch.mul(u, silu, out=p2)
    du = (dp1 * z2).mul_(slope).addcmul_(dp2, silu)
    torch.mul(dhidden, z2, out=dz1).addcmul_(dp2, u).mul_(slope).addcmul_(uz2.mul_(dp1), curve)
    torch.mul(dp1, u, out=dz2).mul_(slope).addcmul_(dhidden, silu)
    return hidden, du, p, dz


def _refusal(inputs: Inputs) -> str | None:
    """The reason why swiglu's kernels do not support the hidden layers, or None if they do."""
    return _native.no_vectors(inputs.q.shape[-1]) or _native.refusal(*inputs)


BACKENDS = {
    "cpu": Backend(_forward, _backward, _refusal),
    "dual": Backend(_forward, _backward, lambda inputs: None),
}
