"""Vision-TTT's Eqs. 13 and 14, of ViT, Vim and Vittt, beside what a token mixer's pass counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import timm
import torch
from torch import nn

from vision_ttt import for_training
from vision_ttt.bench.complexity import macs_of_pass
from vision_ttt.models import create_model

STATE, MINI_BATCH, HEAD_DIM = 16, 16, 64
"""N of Vim, b and d of Vittt."""


class Equations(NamedTuple):
    """Of T tokens of width D, per block and image: multiply-adds (13), numbers in memory (14)."""

    macs: Callable[[int, int], int]
    numbers: Callable[[int, int], int]


EQUATIONS = {
    "ViT": Equations(lambda t, d: 4 * t * d**2 + 2 * t**2 * d, lambda t, d: t * d + t**2),
    "Vim": Equations(
        lambda t, d: 6 * t * d**2 + 18 * t * 2 * d * STATE, lambda t, d: t * d + t * d * STATE
    ),
    "Vittt": Equations(
        lambda t, d: 6 * t * d**2 + 6 * t * d * HEAD_DIM + 4 * MINI_BATCH * t * d,
        lambda t, d: t * d + t * HEAD_DIM + t * d * HEAD_DIM // MINI_BATCH,
    ),
}


class Row(NamedTuple):
    """A mixer at one image size; MACs and numbers of one image and block."""

    model: str
    pixels: int
    tokens: int
    macs: int
    counted_macs: int
    numbers: int
    saved_numbers: int
    """That the mixer's forward pass keeps for the backward pass, without parameters."""


def equation_rows(sizes: list[str], resolutions: list[int]) -> Iterator[Row]:
    """Rows of all three families.

    Args:
        sizes: "tiny", "small" or "base".
        resolutions: sides of square images in pixels, multiples of 16.
    """
    for size in sizes:
        for family in EQUATIONS:
            model, mixer = _mixer(family, size)
            for pixels in resolutions:
                side = pixels // 16
                tokens, dim = side * side, model.embed_dim
                x = torch.empty(1, tokens, dim, device="meta", requires_grad=True)
                inputs = (x, (side, side)) if family == "Vittt" else (x,)
                equations = EQUATIONS[family]
                yield Row(
                    f"{family}-{size}",
                    pixels,
                    tokens,
                    equations.macs(tokens, dim),
                    macs_of_pass(mixer, *inputs),
                    equations.numbers(tokens, dim),
                    saved_numbers(mixer, *inputs),
                )


def saved_numbers(module: nn.Module, *inputs: Any) -> int:
    """Numbers that a forward pass keeps for the backward pass, each storage once."""
    parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        alive.append(storage)  # so that no other takes its address
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage.nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        module(*inputs)
    return sum(kept.values())


def _mixer(family: str, size: str) -> tuple[nn.Module, nn.Module]:
    """A model on the meta device, and its first block's token mixer as it is trained."""
    with torch.device("meta"):
        if family == "ViT":
            model = timm.create_model(f"deit_{size}_patch16_224")
            attention = model.blocks[0].attn
            attention.fused_attn = False  # whose weights Eq. 14 counts
            return model, attention
        model = create_model(f"{family.lower()}_{size}_patch16_224")
    return model, for_training(model).blocks[0].mixer
