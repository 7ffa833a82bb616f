"""Any inner model of :mod:`vision_ttt.inner` as the learner of a TTT layer."""

from __future__ import annotations

from torch import Tensor, nn

from vision_ttt.inner import InnerModel, Learner


class FunctionalLearner(nn.Module):
    """A :class:`vision_ttt.inner.Learner` with its initial state and outer parameters.

    A :class:`TTTLayer` takes it as ``functools.partial(FunctionalLearner, learner=…)``. With two
    directions the second half of the heads scans the tokens from T to 1. Each direction has its own
    initial state.

    Args:
        num_heads: heads per direction, H.
        head_dim: d.
        learner: the inner training; its model is an :class:`vision_ttt.inner.InnerModel`.
        directions: 1 or 2.

    Initialisation: the model's.

    Raises:
        TypeError: the learner's model is a bare function, which has no initial state.
        ValueError: directions is neither 1 nor 2.
    """

    def __init__(
        self, num_heads: int, head_dim: int, *, learner: Learner, directions: int = 1
    ) -> None:
        super().__init__()
        if directions not in (1, 2):
            raise ValueError(f"directions must be 1 or 2, got {directions}")
        if not isinstance(learner.model, InnerModel):
            raise TypeError(
                f"the learner's model must be an InnerModel, which has an initial state; got "
                f"{learner.model!r}"
            )
        self.learner = learner
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.directions = directions
        heads = directions * num_heads
        self.state = nn.ParameterDict(learner.model.initial_state(heads, head_dim))
        self.outer = nn.ParameterDict(learner.model.outer_parameters(heads, head_dim))

    def no_weight_decay(self) -> set[str]:
        """All parameters."""
        return {name for name, _ in self.named_parameters()}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, eta: Tensor) -> Tensor:
        """Learn from k, v [B, T, heads, d] at rates eta [B, T, heads]; apply it to q."""
        reverse_heads = (self.directions - 1) * self.num_heads
        state, outer = dict(self.state.items()), dict(self.outer.items())
        return self.learner(q, k, v, state, outer, eta=eta, reverse_heads=reverse_heads)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"directions={self.directions}, {self.learner}"
        )
