"""The inner weights along the image: how far they move, in how many directions, at which rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vision_ttt.explain.inner_loop import Problem, examine, inner_op, learner_layers, problem_of
from vision_ttt.explain.inner_losses import in_scan_order
from vision_ttt.ops._learner_scan_order import mini_batches

_VIEWS = ("q", "k", "v", "eta")


class FastWeights(NamedTuple):
    """A layer's inner weights along its scan, the mean over images, float32 on the CPU.

    Entry m of the first two is after m mini-batches, entry t of the third of the token that the
    head's direction reads t-th. With ΔW = W_t − W₀:

    - ``drift`` [heads, M + 1]: ‖ΔW‖_F / ‖W₀‖_F; the first is 0.
    - ``effective_rank`` [heads, M + 1]: exp(−Σ p_i ln p_i) with p the singular values of ΔW over
      their sum (Roy and Vetterli, 2007), from 1 to the width of the head, twice the width with two
      layers; 0 where ΔW is 0.
    - ``rates`` [heads, T]: η_t, which multiplies the token's gradient before the position scale.

    A two-layer inner model counts as one block-diagonal matrix of both its weights. Biases are left
    out.
    """

    drift: Tensor
    effective_rank: Tensor
    rates: Tensor


def fast_weights(model: nn.Module, images: Tensor) -> dict[str, FastWeights]:
    """How the inner weights of every TTT layer change along the image.

    The layers' ops run mini-batch by mini-batch, going on from the state that the former has left.
    Singular values are computed of every state: the cost is several forward passes.

    Args:
        model: any model; only its TTT layers of linear or two-layer inner models are reported. It
            is not modified.
        images: the model's input, e.g. [B, C, H, W], or the tokens of a language model [B, T].

    Returns:
        Module name of each TTT layer → its :class:`FastWeights`. Empty for a model without such
        layers.
    """

    def look(layer: nn.Module, arguments: Mapping[str, Any]) -> FastWeights:
        return _course(layer, problem_of(layer, arguments))

    return examine(model, images, learner_layers(model), look)


def effective_rank(matrices: Tensor) -> Tensor:
    """exp of the entropy of the singular values' shares of their sum: [..., n, m] → [...].

    It is k for k equal singular values among zeros, and 0 for the zero matrix.
    """
    return _rank_of(torch.linalg.svdvals(matrices))


def _rank_of(values: Tensor) -> Tensor:
    total = values.sum(-1, keepdim=True)
    shares = values / torch.where(total > 0, total, 1)
    rank = torch.special.entr(shares).sum(-1).exp()
    return torch.where(total.squeeze(-1) > 0, rank, 0)


def _course(layer: nn.Module, problem: Problem) -> FastWeights:
    run, learner = inner_op(layer).run, layer.learner
    reverse_heads = problem["reverse_heads"]
    # A state goes on where all heads scan forwards.
    tokens = {name: in_scan_order(problem[name], reverse_heads) for name in _VIEWS}
    problem = {**problem, **tokens, "reverse_heads": 0}
    names = learner.state_names
    matrices = [index for index, name in enumerate(names) if name.startswith("w")]
    first = [problem[names[index]].float() for index in matrices]  # [heads, …]
    size = sum(w.square().sum((-2, -1)) for w in first).sqrt()  # [heads]
    drift, rank, state = [torch.zeros_like(size)], [torch.zeros_like(size)], None
    for start, stop in mini_batches(problem["k"].shape[1], learner.mini_batch_size):
        part = {name: x[:, start:stop] for name, x in tokens.items()}
        _, state = run(**{**problem, **part}, state=state, return_state=True)
        change = [state[index].float() - w for index, w in zip(matrices, first, strict=True)]
        # The singular values of a block-diagonal matrix are those of its blocks.
        values = torch.cat([torch.linalg.svdvals(w) for w in change], dim=-1)  # [B, heads, …]
        drift.append((values.square().sum(-1).sqrt() / size).mean(0))
        rank.append(_rank_of(values).mean(0))
    rates = tokens["eta"].float().mean(0).T  # [heads, T]
    return FastWeights(
        torch.stack(drift, dim=1).cpu(), torch.stack(rank, dim=1).cpu(), rates.cpu().contiguous()
    )
