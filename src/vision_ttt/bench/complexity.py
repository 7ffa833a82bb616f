"""Multiply-adds and parameters: counted from what a model runs, and from the paper's formula."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vision_ttt.layers import TTTLinear
from vision_ttt.models import Vittt
from vision_ttt.models.evaluation_mode import evaluation_mode
from vision_ttt.ops import use_backend


def count_parameters(model: nn.Module) -> int:
    """Learnable numbers of the model."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def count_macs(model: nn.Module, input_size: tuple[int, ...]) -> int:
    """Multiply-adds of one forward pass on an input [1, *input_size].

    Counts every matrix product, convolution and attention that runs, and the TTT ops by their
    registered formulas; elementwise work, norms and activations are not multiply-adds of Eq. 13
    and are left out, for every model alike.

    Args:
        model: may live on the meta device: nothing is computed there.
        input_size: the input's shape without the batch axis, e.g. (3, 224, 224).
    """
    parameter = next(model.parameters())
    image = torch.zeros(1, *input_size, device=parameter.device, dtype=parameter.dtype)
    # The TTT ops have formulas behind the custom op only, which the reference is not.
    counter = FlopCounterMode(display=False)
    # Models that see more than an image say what else.
    inputs = model.example_inputs(image) if hasattr(model, "example_inputs") else (image,)
    with evaluation_mode(model), use_backend(None), counter:
        model(*inputs)
    return counter.get_total_flops() // 2


def equation_13_macs(model: nn.Module, input_size: tuple[int, ...]) -> int | None:
    """Multiply-adds of a Vittt by Vision-TTT's Eq. 13, with the patch embedding, MLPs and head.

    6 T D² + 6 T D d + 4 b T D per block and 3 T D · hidden for its SwiGLU; for the one-directional
    rows of Table 3 the terms that the row has. The formula leaves out the depth-wise convolutions,
    25 T D per block, and the learning rates, 2 T D H.

    Returns:
        None for a model that the formula does not describe.
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
