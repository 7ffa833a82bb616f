"""The generic inner learner: an executable definition of every TTT layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.inner.checkpointing import checkpointed
from vision_ttt.inner.losses import Loss, squared_error
from vision_ttt.inner.models import Axes, Params
from vision_ttt.ops._backend import autocast_kind, is_transformed
from vision_ttt.ops._contract import FLOATS, Contract, Real, Whole, check_number
from vision_ttt.ops._learner_scan_order import mini_batches, take

Model = Callable[[Params, Tensor], Tensor]
"""f(params, x [n, d]) → [n, d]."""

_VIEWS = ("q", "k", "v")
_CONTRACT = Contract(
    "Learner",
    {**dict.fromkeys(_VIEWS, "B T H d"), "eta": "? B T H"},
    {"reverse_heads": Whole(0, "H")},
    alike=_VIEWS,
    autocast=True,
    dense_last=_VIEWS,
)
_SCALE_CONTRACT = Contract(
    "Learner", {"q": "B T H d", "position_scale": "size | H size"}, {"size": Whole(1)}
)


@dataclass(frozen=True)
class Learner:
    """Train an inner model on (k, v) by gradient descent and apply it to q, per image and head.

    With θ' the state before a mini-batch of n tokens, m' the velocity, s the tokens, L the loss and
    V̂ = f(K; θ')::

        G  = Σ_s η_s (∂L/∂V̂_s) (∂V̂_s/∂θ')          ∂L/∂θ' where all η are 1
        m  = β m' + clip(p G)
        θ  = θ' − α m

    - ``causal=False`` (ViT³): all mini-batches in order, ``epochs`` times; then the final state is
      applied to every query, o = f(Q; θ). There is no p.
    - ``causal=True`` (TTT, Vision-TTT): the state θ_t of token t of a mini-batch has learned from
      the first t tokens, over which L is computed, and o_t = f(q_t; θ_t). The next mini-batch
      continues from the last token's θ and m.

    All derivatives are by ``torch.func``, so that any model and loss is supported. Results are
    differentiable in every tensor, any number of times where ``checkpoint`` is off.

    Args:
        model: f(params, x [n, d]) → [n, d], see :mod:`vision_ttt.inner.models`.
        loss: L(V̂, V) of a batch → scalar, see :mod:`vision_ttt.inner.losses`.
        learning_rate: α ≥ 0.
        momentum: β ≥ 0; the velocity is 0 at the start of every call.
        mini_batch_size: tokens per step, b; the last mini-batch may be short. None for all tokens.
        causal: see above.
        epochs: passes over the tokens; 1 in a causal scan.
        clip_axes: soft clipping (ViT³'s release): the gradient of each parameter named here is
            divided by 1 + its norm along these axes, e.g. ``model.clip_axes``. None for none.
        checkpoint: keep only the states between mini-batches for the backward pass, which computes
            everything else again.

    Raises:
        ValueError: an argument is out of its range, or the model does not support the regime.
    """

    model: Model
    loss: Loss = squared_error
    learning_rate: float = 1.0
    momentum: float = 0.0
    mini_batch_size: int | None = None
    causal: bool = False
    epochs: int = 1
    clip_axes: Axes | None = None
    checkpoint: bool = False

    def __post_init__(self) -> None:
        for name in ("learning_rate", "momentum"):
            check_number("Learner", name, getattr(self, name), Real(0))
        if self.mini_batch_size is not None:
            check_number("Learner", "mini_batch_size", self.mini_batch_size, Whole(1))
        check_number("Learner", "epochs", self.epochs, Whole(1))
        if self.causal and self.epochs > 1:
            raise ValueError(f"Learner: epochs must be 1 in a causal scan, got {self.epochs}")
        if self.causal and self._mixes_tokens:
            raise ValueError(f"Learner: {self.model} mixes tokens and cannot be causal")

    @property
    def _mixes_tokens(self) -> bool:
        return getattr(self.model, "mixes_tokens", False)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Mapping[str, Tensor],
        outer: Mapping[str, Tensor] | None = None,
        *,
        eta: Tensor | None = None,
        position_scale: Tensor | None = None,
        reverse_heads: int = 0,
        state_per_image: bool = False,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, Params]:
        """Learn from k, v and apply the trained states to q.

        Args:
            q, k, v: test, training and label views [B, T, H, d].
            state: the parameters to train, tensors [H, …].
            outer: the model's other parameters, tensors [H, …].
            eta: η of each token [B, T, H]; None for all ones. The learning rate multiplies it.
            position_scale: p_j [b] or [H, b] for the j-th token of a mini-batch, in a causal scan.
            reverse_heads: how many of the last heads scan the tokens from T to 1.
            state_per_image: the state's tensors are [B, H, …].
            return_state: return ``(o, state)`` with the trained state [B, H, …].

        Returns:
            o [B, T, H, d] in q's dtype; everything is computed in at least float32.

        Raises:
            TypeError, ValueError: an argument does not fit; the message names it.
        """
        outer = {} if outer is None else dict(outer)
        self._check(q, k, v, state, outer, eta, position_scale, reverse_heads, state_per_image)
        with torch.autocast(autocast_kind(q), enabled=False):
            o, final = self._learn(
                q, k, v, dict(state), outer, eta, position_scale, reverse_heads, state_per_image
            )
        return (o.to(q.dtype), final) if return_state else o.to(q.dtype)

    def _check(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Mapping[str, Tensor],
        outer: Mapping[str, Tensor],
        eta: Tensor | None,
        position_scale: Tensor | None,
        reverse_heads: int,
        state_per_image: bool,
    ) -> None:
        _CONTRACT.check((q, k, v, eta, reverse_heads))
        batch, length, heads, _ = q.shape
        if reverse_heads and self._mixes_tokens:
            raise ValueError(f"Learner: {self.model} mixes tokens and cannot scan in reverse")
        if not state:
            raise ValueError("Learner: state must hold at least one tensor to train, got none")
        if set(state) & set(outer):
            raise ValueError(f"Learner: {sorted(set(state) & set(outer))} are in state and outer")
        lead = (batch, heads) if state_per_image else (heads,)
        for group, wanted in ((state, lead), (outer, (heads,))):
            for name, x in group.items():
                if not isinstance(x, Tensor) or x.dtype not in FLOATS or x.layout != torch.strided:
                    got = f"{x.layout} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
                    raise TypeError(
                        f"Learner: {name} must be a strided tensor of one of {FLOATS}, got {got}"
                    )
                if x.device != q.device:
                    raise ValueError(f"Learner: {name} is on {x.device}, q on {q.device}")
                if tuple(x.shape[: len(wanted)]) != wanted:
                    raise ValueError(
                        f"Learner: {name} must have shape [{', '.join(map(str, wanted))}, …], "
                        f"got {list(x.shape)}"
                    )
        for name in self.clip_axes or ():
            if name not in state:
                raise ValueError(f"Learner: clip_axes names {name!r}, state has {sorted(state)}")
        if position_scale is not None:
            if not self.causal:
                raise ValueError("Learner: position_scale belongs to a causal scan")
            size = length if self.mini_batch_size is None else self.mini_batch_size
            _SCALE_CONTRACT.check((q, position_scale, size))

    def _learn(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Params,
        outer: Params,
        eta: Tensor | None,
        position_scale: Tensor | None,
        reverse_heads: int,
        state_per_image: bool,
    ) -> tuple[Tensor, Params]:
        batch, length, heads, _ = q.shape
        dtype = torch.promote_types(q.dtype, torch.float32)
        size = length if self.mini_batch_size is None else self.mini_batch_size

        def per_problem(x: Tensor, has_batch: bool) -> Tensor:
            """[B, H, …] in the compute dtype."""
            x = x.to(dtype)
            return x if has_batch else x.expand(batch, *x.shape)

        state = {name: per_problem(x, state_per_image) for name, x in state.items()}
        outer = {name: per_problem(x, False) for name, x in outer.items()}
        velocity = {name: torch.zeros_like(x) for name, x in state.items() if self.momentum}
        if eta is None:
            eta = q.new_ones(q.shape[:3], dtype=dtype)
        if position_scale is None:
            position_scale = q.new_ones(size, dtype=dtype)
        scale = position_scale.to(dtype).expand(batch, heads, size)

        outputs = []
        for _ in range(self.epochs):
            for start, stop in mini_batches(length, size):
                pieces = [take(x, start, stop, reverse_heads).to(dtype) for x in (q, k, v, eta)]
                state, velocity, o = self._step(
                    state, velocity, outer, (*pieces, scale[..., : stop - start])
                )
                if self.causal:
                    outputs.append(o)
        if not self.causal:
            queries = q.transpose(1, 2).to(dtype)
            o = torch.func.vmap(torch.func.vmap(self._predict))(state, outer, queries)
            return o.transpose(1, 2), state
        o = torch.cat(outputs, dim=2).transpose(1, 2)  # [B, T, H, d] in scan order
        forward_heads = heads - reverse_heads
        o = torch.cat([o[:, :, :forward_heads], o[:, :, forward_heads:].flip(1)], dim=2)
        return o, state

    def _step(
        self, state: Params, velocity: Params, outer: Params, pieces: tuple[Tensor, ...]
    ) -> tuple[Params, Params, Tensor]:
        """One mini-batch of all images and heads."""
        function = torch.func.vmap(torch.func.vmap(self._learn_mini_batch))
        if self.checkpoint and torch.is_grad_enabled() and not is_transformed():
            return checkpointed(function, state, velocity, outer, *pieces)
        return function(state, velocity, outer, *pieces)

    def _predict(self, state: Params, outer: Params, x: Tensor) -> Tensor:
        """f(x [n, d])."""
        prediction = self.model({**outer, **state}, x)
        if prediction.shape != x.shape:
            raise ValueError(
                f"Learner: the model must map {list(x.shape)} to {list(x.shape)}, "
                f"it gave {list(prediction.shape)}"
            )
        return prediction

    def _learn_mini_batch(
        self,
        state: Params,
        velocity: Params,
        outer: Params,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        eta: Tensor,
        scale: Tensor,
    ) -> tuple[Params, Params, Tensor]:
        """The state and velocity after the tokens q, k, v [n, d], and o [n, d] in a causal scan."""
        n = k.shape[0]
        prediction, pull_back = torch.func.vjp(lambda s: self._predict(s, outer, k), state)
        # ∂L/∂V̂ of the loss over the first t tokens, for each of the m needed t: [m, n, d].
        lengths = range(1, n + 1) if self.causal else (n,)
        cotangents = torch.stack(
            [
                F.pad(torch.func.grad(self.loss)(prediction[:t], v[:t]), (0, 0, 0, n - t))
                for t in lengths
            ]
        )
        scales = scale if self.causal else scale.new_ones(1)
        weights = scales[:, None, None] * eta[:, None]  # [m, n, 1]
        (gradients,) = torch.func.vmap(pull_back)(weights * cotangents)  # each [m, …]

        velocities, states = {}, {}
        for name, gradient in gradients.items():
            if self.clip_axes and name in self.clip_axes:
                clip = partial(_soft_clip, axes=self.clip_axes[name])
                gradient = torch.func.vmap(clip)(gradient)
            if velocity:
                gradient = self.momentum * velocity[name] + gradient
                velocities[name] = gradient
            states[name] = state[name] - self.learning_rate * gradient
        # Copies: views would keep the states of all tokens in memory.
        last = {name: x[-1].clone() for name, x in states.items()}
        last_velocity = {name: x[-1].clone() for name, x in velocities.items()}
        if not self.causal:
            return last, last_velocity, q.new_empty(0)

        def apply(own: Params, x: Tensor) -> Tensor:
            return self._predict(own, outer, x.unsqueeze(0)).squeeze(0)

        return last, last_velocity, torch.func.vmap(apply)(states, q)


def _soft_clip(gradient: Tensor, axes: tuple[int, ...]) -> Tensor:
    """g / (1 + ‖g‖), the norm along some axes; where g = 0 the derivative is the identity."""
    square = gradient.square().sum(axes, keepdim=True)
    zero = square == 0
    norm = torch.where(zero, 0, torch.where(zero, 1, square).sqrt())
    return gradient / (1 + norm)
