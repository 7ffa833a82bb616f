"""Calls of sequences with padding in which whatever is at the padding must change nothing."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

ANY = pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30], ids=str)
"""What the padding holds in place of 0."""


def absent(lengths: Sequence[int], length: int) -> Tensor:
    """The padding [B, T] behind the tokens."""
    return torch.arange(length) >= torch.tensor(lengths)[:, None]


def check_padding(
    call: Callable[..., Sequence[Tensor]],
    tokens: dict[str, Tensor],
    others: Sequence[Tensor],
    padding: Tensor,
    value: float,
) -> None:
    """Check that a value at the padding gives the results and gradients that 0 there gives.

    Args:
        call: returns outputs, of which those that are padded themselves are [B, T, …].
        tokens: its arguments [B, T, …].
        others: parameters, and whatever else it is differentiated in.
        padding: [B, T].
        value: it is also what the outputs' incoming gradient has at the padding.
    """
    wanted, wanted_gradients = _results(call, tokens, others, padding, 0.0)
    got, gradients = _results(call, tokens, others, padding, value)
    for x, y in zip(got, wanted, strict=True):
        assert torch.isfinite(y).all()
        assert torch.equal(x, y)
    assert sum(x is not None for x in gradients) > len(tokens)
    for x, y in zip(gradients, wanted_gradients, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert torch.isfinite(y).all()
            assert torch.equal(x, y)
    for x in (*(x for x in got if _is_padded(x, padding)), *gradients[: len(tokens)]):
        assert (x[padding] == 0).all()
        assert (x[~padding] != 0).any()


def _results(
    call: Callable[..., Sequence[Tensor]],
    tokens: dict[str, Tensor],
    others: Sequence[Tensor],
    padding: Tensor,
    value: float,
) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
    def filled(x: Tensor) -> Tensor:
        x = x.detach().clone()
        x[padding] = value
        return x

    given = {name: filled(x).requires_grad_() for name, x in tokens.items()}
    outputs = [x for x in call(**given) if x.is_floating_point()]
    generator = torch.Generator().manual_seed(1)
    incoming = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]
    incoming = [filled(x) if _is_padded(x, padding) else x for x in incoming]
    leaves = [*given.values(), *others]
    return outputs, torch.autograd.grad(outputs, leaves, incoming, allow_unused=True)


def _is_padded(x: Tensor, padding: Tensor) -> bool:
    return x.shape[:2] == padding.shape
