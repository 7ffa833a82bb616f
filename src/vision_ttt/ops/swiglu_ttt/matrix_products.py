"""swiglu_ttt by PyTorch's matrix products, with the op swiglu between them.

The analytic backward pass saves the arguments only, and computes the step again. On a CPU the
tokens are processed in chunks, so that their hidden layers stay in the cache. The matrices of the
gate and the value are one, [W₁ W₂]: ``up`` [H, d, 2 d]; W₃ is ``down`` [H, d, d].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._op import Backend
from vision_ttt.ops.swiglu import swiglu
from vision_ttt.ops.swiglu_mlp.matrix_products import swiglu_backward
from vision_ttt.ops.swiglu_ttt.contract import Inputs

TOKENS_AT_ONCE = 1024
"""Tokens of a chunk on a CPU."""


def _precision(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def parts(x: Tensor) -> Iterator[slice]:
    """Yield the chunks of the tokens of x [B, T, H, d]."""
    length = x.shape[1]
    size = TOKENS_AT_ONCE if x.is_cpu else length
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def heads_of(x: Tensor, part: slice) -> Tensor:
    """Tokens of x [B, T, H, d] as [B, H, t, d], at least float32."""
    return x[:, part].to(_precision(x)).transpose(1, 2).contiguous()


def initial(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``up`` and ``down`` before the step."""
    wide = _precision(inputs.q)
    return torch.cat((inputs.w1, inputs.w2), dim=-1).to(wide), inputs.w3.to(wide)


def _step(inputs: Inputs, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """``up`` [B, H, d, 2 d] and ``down`` [B, H, d, d] after the step."""
    scale = inputs.loss_scale()
    of_up, of_down = ascent(inputs.k, inputs.v, up, down)
    return up + scale * of_up, down + scale * of_down


def ascent(k: Tensor, v: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """The sums Σ_t ∂⟨f(k_t), v_t⟩/∂W for ``up`` [B, H, d, 2 d] and ``down`` [B, H, d, d]."""
    of_up, of_down = (w.new_zeros(len(k), *w.shape) for w in (up, down))
    for part in parts(k):
        keys, values = heads_of(k, part), heads_of(v, part)
        z = keys @ up
        of_up += keys.mT @ swiglu_backward(values @ down.mT, z)
        of_down += swiglu(z).mT @ values
    return of_up, of_down


def outputs(q: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """f(q) [B, T, H, d] with each image's ``up`` and ``down``."""
    out = q.new_empty(q.shape)
    for part in parts(q):
        out[:, part] = (swiglu(heads_of(q, part) @ up) @ down).transpose(1, 2)
    return out


def _forward(inputs: Inputs) -> Tensor:
    return outputs(inputs.q, *_step(inputs, *initial(inputs)))


def _backward(inputs: Inputs, grad: Tensor) -> tuple[Tensor, ...]:
    up, down = initial(inputs)
    dq, dk, dv = (x.new_empty(x.shape) for x in inputs[:3])
    # Through the outputs to the weights after the step …
    new_up, new_down = _step(inputs, up, down)
    of_up, of_down = torch.zeros_like(new_up), torch.zeros_like(new_down)
    for part in parts(inputs.q):
        q, g = heads_of(inputs.q, part), heads_of(grad, part)
        z = q @ new_up
        dz = swiglu_backward(g @ new_down.mT, z)
        dq[:, part] = (dz @ new_up.mT).transpose(1, 2)
        of_up += q.mT @ dz
        of_down += swiglu(z).mT @ g
    # … and through the step, whose gradients are kᵀ p and hiddenᵀ v, to those before it.
    dup, ddown = of_up.sum(0), of_down.sum(0)
    scale = inputs.loss_scale()
    of_up, of_down = scale * of_up, scale * of_down
    for part in parts(inputs.k):
        k, v = heads_of(inputs.k, part), heads_of(inputs.v, part)
        z1, z2 = (k @ up).chunk(2, dim=-1)
        gate = z1.sigmoid()
        silu = z1 * gate
        slope = gate + silu * (1 - gate)  # SiLU's derivative
        curve = gate * (1 - gate) * (2 + z1 * (1 - 2 * gate))  # its second one
        u = v @ down.mT
        p = torch.cat((u * z2 * slope, u * silu), dim=-1)
        dp1, dp2 = (k @ of_up).chunk(2, dim=-1)
        dhidden = v @ of_down.mT
        du = dp1 * z2 * slope + dp2 * silu
        dz1 = dp1 * u * z2 * curve + (dp2 * u + dhidden * z2) * slope
        dz = torch.cat((dz1, dp1 * u * slope + dhidden * silu), dim=-1)
        dk[:, part] = (dz @ up.mT + p @ of_up.mT).transpose(1, 2)
        dv[:, part] = (du @ down + (silu * z2) @ of_down).transpose(1, 2)
        dup += (k.mT @ dz).sum(0)
        ddown += (du.mT @ v).sum(0)
    dw1, dw2 = dup.chunk(2, dim=-1)
    weights = zip((dw1, dw2, ddown), inputs[3:], strict=True)
    return dq, dk, dv, *(x.to(w.dtype).contiguous() for x, w in weights)


def _refusal(inputs: Inputs) -> str | None:
    """The reason why swiglu's kernels do not support the hidden layers, or None if they do."""
    return _native.no_vectors(inputs.q.shape[-1]) or _native.refusal(*inputs)


BACKENDS = {
    "cpu": Backend(_forward, _backward, _refusal),
    "dual": Backend(_forward, _backward, lambda inputs: None),
}
