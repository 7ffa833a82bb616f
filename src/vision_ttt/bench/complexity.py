"""Multiply-adds and parameters of a model: counted in a run, and by the paper's formula."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vision_ttt.layers import TTTLinear
from vision_ttt.models import Vittt
from vision_ttt.models.evaluation_mode import evaluation_mode
from vision_ttt.ops import use_backend


def _attention_flops(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *_: Any, **__: Any
) -> int:
    """Of softmax(q kᵀ) v, by the shapes [B, H, T, d]: two per multiply-add."""
    batch, heads, queries, width = q
    return 2 * batch * heads * queries * k[2] * (width + v[3])


_FORMULAS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
"""Operations that PyTorch before 2.15 does not count."""


def count_parameters(model: nn.Module) -> int:
    """The number of learnable parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(model: nn.Module, input_size: tuple[int, ...]) -> int:
    """Multiply-adds of one forward pass on an input [1, *input_size].

    The count includes every matrix product, convolution and attention that runs, and the TTT ops by
    their registered formulas. It excludes elementwise operations, norms and activations, which
    Eq. 13 does not count either.

    Args:
        model: any model. On the meta device nothing is computed.
        input_size: the input's shape without the batch axis, e.g. (3, 224, 224).
    """
    parameter = next(model.parameters())
    image = torch.zeros(1, *input_size, device=parameter.device, dtype=parameter.dtype)
    # A model with more inputs than an image has a method that makes examples of them.
    inputs = model.example_inputs(image) if hasattr(model, "example_inputs") else (image,)
    return macs_of_pass(model, *inputs)


@torch.no_grad()
def macs_of_pass(model: nn.Module, *inputs: Tensor) -> int:
    """Multiply-adds of one forward pass on `inputs`, counted as :func:`count_macs` does."""
    # The TTT ops' formulas belong to the custom ops, which the reference backend does not call.
    counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    with evaluation_mode(model), use_backend(None), counter:
        model(*inputs)
    return counter.get_total_flops() // 2


def equation_13_macs(model: nn.Module, input_size: tuple[int, ...]) -> int | None:
    """Multiply-adds of a Vittt by Vision-TTT's Eq. 13, with the patch embedding, MLPs and head.

    A block has 6 T D² + 6 T D d + 4 b T D, and 3 T D · hidden for its SwiGLU. The one-directional
    rows of Table 3 have fewer terms. The formula excludes the depth-wise convolutions, 25 T D per
    block, and the learning rates, 2 T D H.

    Returns:
        The count, or None for a model that the formula does not describe.
    """
    if not isinstance(model, Vittt) or not all(
        isinstance(block.mixer.ttt, TTTLinear) for block in model.blocks
    ):
        return None
    dim = model.embed_dim
    height, width = model.patch_embed.dynamic_feat_size(input_size[1:])
    tokens = height * width
    total = tokens * model.patch_embed.proj.weight.numel()
    if model.class_tokens is not None:
        tokens += model.class_tokens.tokens.shape[1]
    for block in model.blocks:
        ttt = block.mixer.ttt
        directions = ttt.learner.directions
        projections = dim + sum(ttt.widths.values())
        mini_batch = min(ttt.learner.mini_batch_size, tokens)
        scans = directions * (3 * ttt.head_dim + 2 * mini_batch)
        total += tokens * dim * (projections + scans + 3 * block.mlp.fc2.in_features)
    return total + dim * model.num_classes * (1 if model.global_pool else tokens)
