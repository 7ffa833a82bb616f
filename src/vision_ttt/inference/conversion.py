"""for_inference: which modules of a model give way to packed ones, and which stay."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from vision_ttt.inference.evaluation_only import EvaluationOnly
from vision_ttt.inference.known_parts import Unknown
from vision_ttt.inference.linear import PackedLinear, PackedPatches
from vision_ttt.inference.vit3 import PackedDit3Block, PackedVit3Block
from vision_ttt.inference.vittt import PackedVitttBlock
from vision_ttt.ops._native import LIBRARY, install_command
from vision_ttt.ops.packed.weights import DTYPES

PACKED_BLOCKS: list[Any] = [PackedVitttBlock, PackedVit3Block, PackedDit3Block]
"""Classes of blocks on packed weights; a new family of models adds its own.

Each names the class it stands for as ``kind``. It is made of a ``kind`` and a dtype, raises
:class:`vision_ttt.inference.known_parts.Unknown` where it does not know a part of it, and is called
as a ``kind`` is, with float32 tokens.
"""


def for_inference(
    model: nn.Module, *, dtype: torch.dtype | None = None, strict: bool = False
) -> EvaluationOnly:
    """A copy of ``model`` to be evaluated fast on a CPU.

    The blocks of Vittt, ViT³, H-ViT³ and DiT³ become one op each, on weights packed for the
    machine's multiply-adds. Linear layers and patch embeddings of these and of any other model are
    packed too. Whatever else there is stays as it was. So does a block of which a part has been
    replaced, changed or has a hook: a warning names it.

    Results are those of the model in evaluation mode, to rounding. The model itself is left alone.

    Args:
        model: on a CPU.
        dtype: of the packed weights and of what is multiplied by them, ``torch.float32`` (the
            default) or ``torch.bfloat16``, which is faster where the processor multiplies it and
            whose logits differ by up to a hundredth or so of the largest. States, norms and sums
            are float32 in either. A model without a block of ours is cast as a whole. Images go in
            and logits come out in float32.
        strict: raise instead of warn.

    Returns:
        The copy, which refuses training, gradients and the loading of weights.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: another dtype; the model is not on a CPU; or with ``strict`` a block stays as it
            was, or the compiled kernels are missing.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    dtype = torch.float32 if dtype is None else dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {list(DTYPES)}, got {dtype}")
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.device.type != "cpu":
            raise ValueError(
                f"for_inference is for CPUs now; {name} is on {x.device}. There, call "
                "torch.compile(model.eval())"
            )
    packed = copy.deepcopy(model).eval().float().requires_grad_(False)
    packed, stay = _pack_blocks(packed, dtype)
    if LIBRARY is None:
        stay[""] = f"the compiled kernels are missing; to get them, run: {install_command()}"
    if stay:
        message = "for_inference leaves as they are: " + "; ".join(
            f"{name or 'the model'} ({reason})" for name, reason in stay.items()
        )
        if strict:
            raise ValueError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    if LIBRARY is None:
        return EvaluationOnly(packed, None)
    ours = any(isinstance(module, tuple(PACKED_BLOCKS)) for module in packed.modules())
    cast = dtype if dtype != torch.float32 and not ours and not stay else None
    if cast is not None:
        packed = packed.to(cast)
    for name, module in list(_outside(packed, stay)):
        replacement = _packed_layer(module, dtype)
        if replacement is not None:
            packed = _replaced(packed, name, replacement)
    return EvaluationOnly(packed, cast)


def _pack_blocks(model: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, dict[str, str]]:
    """Put packed blocks in the place of those that can be; say why others stay, by name."""
    stay = {}
    for name, module in list(model.named_modules()):
        for packed_block in PACKED_BLOCKS:
            if isinstance(module, packed_block.kind):
                try:
                    replacement = packed_block(module, dtype)
                except Unknown as unknown:
                    stay[name] = str(unknown)
                else:
                    model = _replaced(model, name, replacement)
    return model, stay


def _outside(model: nn.Module, stay: dict[str, str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are in no block which stays as it is."""
    for name, module in model.named_modules():
        if not any(name == block or name.startswith(f"{block}.") for block in stay):
            yield name, module


def _packed_layer(module: nn.Module, dtype: torch.dtype) -> nn.Module | None:
    """A packed layer that does as ``module``, or None: others are called as they are."""
    for kind, packed in ((nn.Linear, PackedLinear), (nn.Conv2d, PackedPatches)):
        if isinstance(module, kind):
            try:
                return packed(module, dtype)
            except Unknown:
                return None
    return None


def _replaced(model: nn.Module, name: str, replacement: nn.Module) -> nn.Module:
    if not name:
        return replacement
    model.set_submodule(name, replacement)
    return model
