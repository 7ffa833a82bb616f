"""for_training: makes a model run its blocks by composite ops in training."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from vision_ttt.acceleration.composite_linear import CompositeLinear
from vision_ttt.acceleration.composite_mamba import CompositeMamba
from vision_ttt.acceleration.composite_vittt import CompositeTTTLinear, CompositeVitttBlock
from vision_ttt.acceleration.evaluation_only import EvaluationOnly
from vision_ttt.acceleration.supported_parts import UnsupportedPart

COMPOSITES: tuple[Any, ...] = (CompositeTTTLinear, CompositeVitttBlock, CompositeMamba)
"""Classes of composite modules; a new family of models adds its own.

Each is a subclass of the module's class, named as ``plain``, that adds no attributes and overrides
``forward``. Its ``require_support`` raises :class:`UnsupportedPart` for a module that it does not
support. Its ``forward`` runs that of ``plain`` in evaluation mode and where a part has changed.
"""


def for_training(model: nn.Module, *, strict: bool = False) -> nn.Module:
    """Make a model train with composite ops, which save fewer tensors for the backward pass.

    On a CPU the composite ops of Vittt are also faster; those of Mamba only save memory.

    The TTT-Linear layers and the MLPs of Vittt, the Mamba layers of Vim and Mamba-Reg, and the
    linear layers of any model run as one op each. The model stays the same object, with the same
    parameters under the same names: only the classes of these modules change, to subclasses of
    their own. Optimisers, checkpoints, DDP, FSDP, averages and gradient checkpointing work as
    before. Results are equal up to rounding.

    In evaluation mode the model runs as it did before, with the same bits.

    A module with a hook, an adapter or another replaced part keeps its class, and a warning names
    it. One that is changed later runs its parts again, so that every hook is called.

    Args:
        model: on any device. It must not have been compiled or sharded yet.
        strict: raise instead of warn, and leave the model as it was.

    Returns:
        ``model``. :func:`to_plain` reverts it.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the model is the result of :func:`vision_ttt.for_inference`; with ``strict``
            also: a module of these kinds has no composite form.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    kinds = [(module, type(module)) for module in model.modules()]
    left = use_composite_ops(model)
    if left:
        message = f"for_training leaves as they are: {left}"
        if strict:
            for module, kind in kinds:
                module.__class__ = kind
            raise ValueError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return model


def to_plain(model: nn.Module) -> nn.Module:
    """Revert :func:`for_training`: every module has its own class again. Returns ``model``."""
    for module in model.modules():
        if type(module) in (CompositeLinear, *COMPOSITES):
            module.__class__ = type(module).plain
    return model


def use_composite_ops(model: nn.Module) -> str:
    """Do what :func:`for_training` does; return what keeps its class and why, or ""."""
    if any(isinstance(module, EvaluationOnly) for module in model.modules()):
        raise ValueError("for_inference has packed this model for evaluation; give the original")
    for module in model.modules():
        if type(module) is nn.Linear:  # its subclasses are other layers
            module.__class__ = CompositeLinear
    stay: dict[str, list[str]] = {}
    for composite in COMPOSITES:
        for name, module in model.named_modules():
            if type(module) is composite or not isinstance(module, composite.plain):
                continue
            try:
                composite.require_support(module)
            except UnsupportedPart as unsupported:
                stay.setdefault(str(unsupported), []).append(name or "the model")
            else:
                module.__class__ = composite
    return "; ".join(f"{_some(names)} ({reason})" for reason, names in stay.items())


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
