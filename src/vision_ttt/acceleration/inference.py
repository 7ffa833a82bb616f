"""for_inference: replaces the modules of a model that have a packed form, and keeps the others."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from vision_ttt.acceleration.evaluation_only import EvaluationOnly
from vision_ttt.acceleration.packed_linear import FoldedConvNorm, PackedLinear, PackedPatches
from vision_ttt.acceleration.packed_linear_vit import PackedLinearBlock
from vision_ttt.acceleration.packed_mamba import PackedMambaBlock
from vision_ttt.acceleration.packed_vit3 import PackedDit3Block, PackedVit3Block
from vision_ttt.acceleration.packed_vittt import PackedVitttBlock, PackedVitttBlocks
from vision_ttt.acceleration.supported_parts import OtherDesign, UnsupportedPart, require
from vision_ttt.acceleration.training import to_plain
from vision_ttt.layers.conv_stem import ConvNorm
from vision_ttt.ops._native import LIBRARY, install_command
from vision_ttt.ops.packed.weights import DTYPES

PACKED_BLOCKS: list[Any] = [
    PackedVitttBlock,
    PackedVit3Block,
    PackedDit3Block,
    PackedMambaBlock,
    PackedLinearBlock,
]
"""Classes of blocks on packed weights; a new family of models adds its own.

Each class names the class of blocks that it replaces as ``kind``. Its constructor takes a block of
that kind and a dtype. It raises :class:`UnsupportedPart` if it does not support a part,
:class:`OtherDesign` if the layers of the block must be packed one by one, and its op's ValueError
if parameters have other shapes. Its instances are called like the block, with float32 tokens.
"""

_PACKED_LAYERS: tuple[tuple[type[nn.Module], Any], ...] = (
    (nn.Linear, PackedLinear),
    (nn.Conv2d, PackedPatches),
    (ConvNorm, FoldedConvNorm),
)
"""Kinds of layers outside these blocks, and their packed forms."""


def for_inference(
    model: nn.Module, *, dtype: torch.dtype | None = None, strict: bool = False
) -> EvaluationOnly:
    """A copy of ``model`` for fast evaluation on a CPU.

    Each block of Vittt, ViT³, H-ViT³, DiT³, Vim, Mamba-Reg, and of a linearised ViT with SwiGLU
    inner models becomes one op. Its weights are packed in the order in which the kernels read them.
    All blocks of a Vittt run as one op. Linear layers and patch embeddings of these and of any
    other model are packed, too, and the BatchNorm of a convolutional stem becomes part of its
    convolution. All other modules stay as they are. A block also stays as it is if one of its parts
    was replaced or changed or has a hook; a warning then names the block.

    Results equal those of the model in evaluation mode, to rounding. The model is not changed.

    Args:
        model: on a CPU.
        dtype: of the packed weights and of the matrices multiplied by them: ``torch.float32`` (the
            default) or ``torch.bfloat16``, which is faster on processors with bfloat16 products
            and changes logits by about a hundredth of the largest. States, norms and sums are
            float32 in both. A model of another family, such as Vision-RWKV, is cast as a whole.
            Images and logits are float32.
        strict: raise instead of warn.

    Returns:
        The copy. It supports neither training nor gradients nor loading weights.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the dtype is not supported, or the model is not on a CPU or is already packed.
            With ``strict`` also if a block is not supported or the compiled kernels are missing.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    dtype = torch.float32 if dtype is None else dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {list(DTYPES)}, got {dtype}")
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.device.type != "cpu":
            raise ValueError(
                f"for_inference supports CPUs only; {name} is on {x.device}. On that device use "
                "torch.compile(model.eval())"
            )
    if any(isinstance(module, EvaluationOnly) for module in model.modules()):
        raise ValueError("for_inference has packed this model already; give it the original one")
    packed, stay = pack_blocks(model, dtype)
    if stay:
        message = "for_inference leaves as they are: " + told(stay)
        if strict:
            raise ValueError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    if LIBRARY is None:
        return EvaluationOnly(packed, None)
    blocks = (*PACKED_BLOCKS, *(each.kind for each in PACKED_BLOCKS))
    ours = any(isinstance(module, blocks) for module in packed.modules())
    cast = dtype if dtype != torch.float32 and not ours and not stay else None
    if cast is not None:
        packed = packed.to(cast)
    done: str | None = None
    for module, names in _places(packed).items():
        name = names[0]
        if any(_is_within(name, block) for block in stay):
            continue
        if done is not None and _is_within(name, done):  # a part of a layer that was packed
            continue
        if isinstance(module, nn.TransformerEncoderLayer):  # its fast path reads its weights
            done = name
            continue
        for kind, packed_layer in _PACKED_LAYERS:
            if isinstance(module, kind):
                with suppress(UnsupportedPart):
                    packed = _replaced(packed, names, packed_layer(module, dtype))
                    done = name
    return EvaluationOnly(packed, cast)


def pack_blocks(model: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, dict[str, str]]:
    """A copy with the supported blocks packed, and name → reason for blocks that are not packed.

    A reason that applies to the whole model has the name "". Blocks of another design have none.
    """
    model = copy.deepcopy(model).eval().float().requires_grad_(False)
    to_plain(model)
    stay = {}
    for module, names in _places(model).items():
        for packed_block in PACKED_BLOCKS:
            if isinstance(module, packed_block.kind):
                try:
                    replacement = packed_block(module, dtype)
                except OtherDesign:
                    pass  # its layers have packed forms of their own
                except (UnsupportedPart, ValueError) as unsupported:
                    stay[names[0]] = str(unsupported)
                else:
                    model = _replaced(model, names, replacement)
    for module, names in _places(model).items():
        if isinstance(module, PackedVitttBlocks.kind):
            with suppress(UnsupportedPart):  # its blocks are called one by one
                require(module, "it", PackedVitttBlocks.kind)
                model = _replaced(model, names, PackedVitttBlocks(module))
    if LIBRARY is None:
        stay[""] = f"the compiled kernels are missing; to get them, run: {install_command()}"
    return model, stay


def told(stay: Mapping[str, str]) -> str:
    """The blocks that are not packed, and the reasons."""
    return "; ".join(f"{name or 'the model'} ({reason})" for name, reason in stay.items())


def _is_within(name: str, outer: str) -> bool:
    """Whether a module is another one, named ``outer``, or a part of it; "" is the model."""
    return f"{name}.".startswith(f"{outer}." if outer else "")


def _places(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Each module → its names, several where it is registered several times."""
    places: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(name)
    return places


def _replaced(model: nn.Module, names: list[str], replacement: nn.Module) -> nn.Module:
    if names == [""]:
        return replacement
    for name in names:
        model.set_submodule(name, replacement)
    return model
