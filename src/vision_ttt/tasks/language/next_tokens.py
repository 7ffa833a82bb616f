"""The forward pass of a language model on whole sequences."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from vision_ttt.engine.evaluation import at_least_one
from vision_ttt.ops import selective_scan

_MAMBA = "transformers.models.mamba.modeling_mamba"
_SCAN = "mamba_selective_scan"


def next_token_logits(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return what a causal model says of each next token: inputs [B, T] → logits [B, T, V].

    Of no sequence they are empty, but of the model's graph: other processes wait for it.
    """
    with scans_as_one_op():
        return model(at_least_one(inputs), use_cache=False).logits[: len(inputs)]


@contextmanager
def scans_as_one_op() -> Iterator[None]:
    """Let transformers' Mamba call our `selective_scan` on CPUs, while the context is entered.

    There it has nothing but a loop over the tokens in Python, which takes many times as long.
    """
    module = sys.modules.get(_MAMBA)
    if module is None:  # no such model has been built
        yield
        return
    former = getattr(module, _SCAN)
    setattr(module, _SCAN, _our_scan(former))
    try:
        yield
    finally:
        setattr(module, _SCAN, former)


def _our_scan(former: Callable[..., Any]) -> Callable[..., Any]:
    def scan(
        u: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **others: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        options = {"delta_bias": delta_bias, "delta_softplus": delta_softplus}
        if u.device.type not in ("cpu", "meta"):
            options |= {"return_last_state": return_last_state, **others}
            return former(u, delta, A, B, C, D=D, z=z, **options)
        # Theirs have channels before tokens.
        rows = [None if x is None else x.transpose(1, 2) for x in (u, delta, B, C, z)]
        u, delta, B, C, z = rows
        found = selective_scan(u, delta, A, B, C, D, z, return_state=return_last_state, **options)
        if return_last_state:
            return found[0].transpose(1, 2), found[1]
        return found.transpose(1, 2)

    return scan
