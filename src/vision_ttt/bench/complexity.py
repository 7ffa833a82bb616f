"""Multiply-adds and parameters of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vision_ttt.models.evaluation_mode import evaluation_mode
from vision_ttt.ops import use_backend


def _attention_flops(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> int:
    """Of softmax(q kᵀ) v, by the shapes [B, H, T, d]: two per multiply-add.

    A causal kernel computes no scores of later tokens.
    """
    batch, heads, queries, width = q
    pairs = queries * (queries + 1) // 2 if is_causal else queries * k[2]
    return 2 * batch * heads * pairs * (width + v[3])


_FORMULAS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
"""Operations that PyTorch before 2.15 does not count."""


def count_parameters(model: nn.Module) -> int:
    """The number of learnable parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(model: nn.Module, input_size: tuple[int, ...]) -> int:
    """Multiply-adds of one forward pass on an input [1, *input_size].

    The count includes every matrix product, convolution and attention that runs, and the TTT ops by
    their registered formulas. Causal attention on a CPU counts as its kernel computes it, without
    the scores of later tokens. Elementwise operations, norms and activations are not counted, as in
    Eq. 13 of Vision-TTT.

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
