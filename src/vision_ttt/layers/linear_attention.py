"""Linear attention in the place of an inner learner."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.ops import LinearState
from vision_ttt.ops._contract import Contract, Whole
from vision_ttt.ops.padding import fill_padding, padding_of
from vision_ttt.ops.vit3_ttt.descent import without_autocast

_CHUNK = 64  # tokens whose products with each other are computed at once
_LEAST = 1e-6  # of a normaliser
_CONTRACT = Contract(
    "LinearAttention",
    {
        **dict.fromkeys("qkv", "B T H d"),
        "eta": "B T H",
        "state.w": "? B H d d",
        "state.b": "? B H d",
    },
    {"H": Whole(1), "d": Whole(1)},
)


class LinearAttention(nn.Module):
    """Causal linear attention, the beginning of TTT's Table 1: [B, T, H, d] → [B, T, H, d].

    Without a normaliser, o_t = Σ_{s≤t} (q_tᵀ k_s + 1) η_s v_s: batch gradient descent on
    f(x) = x W + b from W = 0 and b = 0 (TTT, Theorem 1; the 1 is the bias's part). With one,
    φ(x) = elu(x) + 1 and o_t = Σ_{s≤t} φ(q_t)ᵀ φ(k_s) η_s v_s / Σ_{s≤t} φ(q_t)ᵀ φ(k_s)
    (Katharopoulos et al., 2020).

    A :class:`TTTLayer` takes it as ``functools.partial(LinearAttention, normalised=…)``.

    Args:
        num_heads, head_dim: H and d. There are no parameters.
        normalised: use φ and the normaliser.
        period: tokens after which the rotations of the layer begin anew.
        directions: 1, the only value.

    Raises:
        ValueError: there are two directions.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        normalised: bool = False,
        period: int = 16,
        directions: int = 1,
    ) -> None:
        super().__init__()
        if directions != 1:
            raise ValueError(f"linear attention is causal: directions must be 1, got {directions}")
        self.num_heads, self.head_dim = num_heads, head_dim
        self.normalised, self.period = normalised, period

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        eta: Tensor,
        state: LinearState | None = None,
        return_state: bool = False,
        lengths: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, LinearState]:
        """Attend by q to k, v [B, T, H, d], weighted by eta [B, T, H].

        The state has Σ kᵀ η v as ``w``; as ``b`` it has Σ η v, or Σ φ(k) with a normaliser. Both
        are at least float32, whatever the precision of the views and of eta.

        Raises:
            TypeError, ValueError: the tensors, the state or the lengths do not fit.
        """
        if state is not None:
            _check_state(state)
        before = (None, None) if state is None else (state.w, state.b)
        _CONTRACT.check((q, k, v, eta, *before, self.num_heads, self.head_dim))
        padding = padding_of("LinearAttention", lengths, q)
        with without_autocast(q):
            o, w, b = self._attend(q, k, v, eta, *before, padding)
        if not return_state:
            return o
        position = 0 if state is None else state.position
        added = q.shape[1] if lengths is None else lengths
        return o, LinearState(w, b, position=(position + added) % self.period)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        eta: Tensor,
        w: Tensor | None,
        b: Tensor | None,
        padding: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs, and both sums after the last token."""
        dtype, length = q.dtype, q.shape[1]
        q, k, v, eta = (x.to(torch.promote_types(eta.dtype, torch.float32)) for x in (q, k, v, eta))
        v = fill_padding(v * eta.unsqueeze(-1), padding)
        if self.normalised:
            q, k = F.elu(q) + 1, F.elu(k) + 1
        k = fill_padding(k, padding)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, T, d]
        if w is None or b is None:
            w = v.new_zeros(*v.shape[:2], self.head_dim, self.head_dim)
            b = v.new_zeros(v[:, :, 0].shape)
        w, b = w.to(v.dtype), b.to(v.dtype)
        outputs = []
        for start in range(0, length, _CHUNK):
            q_t, k_t, v_t = (x[:, :, start : start + _CHUNK] for x in (q, k, v))
            scores = (q_t @ k_t.transpose(-1, -2) + (0 if self.normalised else 1)).tril()
            o = scores @ v_t + q_t @ w
            if self.normalised:
                total = scores.sum(-1, keepdim=True) + q_t @ b.unsqueeze(-1)
                o = o / total.clamp(min=_LEAST)
            else:
                o = o + b.unsqueeze(-2)
            outputs.append(o)
            w = w + k_t.transpose(-1, -2) @ v_t
            b = b + (k_t if self.normalised else v_t).sum(-2)
        return torch.cat(outputs, dim=2).transpose(1, 2).to(dtype), w, b

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, normalised={self.normalised}"


def _check_state(state: LinearState) -> None:
    """Raise an error unless a state is one that LinearAttention returned."""
    if not isinstance(state, LinearState):
        raise TypeError(f"LinearAttention: state must be a LinearState, got {type(state).__name__}")
    for name in ("w", "b", "position"):
        if getattr(state, name) is None:
            raise ValueError(f"LinearAttention: state.{name} is missing: the state cannot go on")
    if state.start_w is not None:
        raise ValueError(
            "LinearAttention: state has start_w: it is a state of ttt_linear, whose sums differ"
        )
