"""Released weights → a state dict that a model of this library loads strictly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vision_ttt.convert.dit3 import DIT3
from vision_ttt.convert.family import ConversionError, Family
from vision_ttt.convert.mamba import MAMBA_REG, VIM
from vision_ttt.convert.ttt_lm import TTT_LM
from vision_ttt.convert.vit3 import H_VIT3, H_VIT3_MAPS, VIT3
from vision_ttt.convert.vrwkv import VRWKV
from vision_ttt.errors import some
from vision_ttt.models.number_kinds import of_another_kind

FAMILIES: tuple[Family, ...] = (VIT3, H_VIT3, DIT3, VIM, MAMBA_REG, VRWKV)
"""The families of timm's models whose releases are supported."""

_ALL = (*FAMILIES, H_VIT3_MAPS, TTT_LM)
"""With the backbones of detectors and segmenters, and with language models."""


def remap(released: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rename released weights to the names and shapes of ``model``'s state dict.

    Tensors that the model computes itself (tables of positions) are compared with its own and
    dropped; of a detector's or segmenter's release, whose maps ``model`` is, pyramid and heads are
    dropped, too. All other tensors of both sides must correspond.

    Args:
        released: the release's state dict.
        model: a model of this library, on any device, also meta: only its class, names and shapes
            are used.

    Returns:
        Tensors for ``model.load_state_dict`` with strict=True. They share the release's memory,
        except where one consists of several.

    Raises:
        ConversionError: a ValueError. The model belongs to no family of FAMILIES, the weights are
            another family's, or tensors are missing, unexpected, of another shape or of another
            kind of numbers. The message has their names in the release.
    """
    family = _family_of(model)
    others = [other.name for other in _ALL if other.name != family.name and other.made(released)]
    if others and not family.made(released):
        raise ConversionError(
            f"these are weights of {others[0]}, and {type(model).__name__} takes those of "
            f"{family.name}"
        )
    released = family.prepared(released)
    own = {key: (_names(family, key), value) for key, value in model.state_dict().items()}
    wanted = {name for names, _ in own.values() for name in names}
    found = {
        key: _fitted([released[name] for name in names], to)
        for key, (names, to) in own.items()
        if all(name in released for name in names)
    }
    missing = sorted(wanted - released.keys())
    left_over = [
        name
        for name, value in released.items()
        if name not in wanted
        and not name.startswith(family.other_parts)
        and not family.is_derived(name, value)
    ]
    misshapen = [
        " + ".join(f"{name} {list(released[name].shape)}" for name in own[key][0])
        + f" for {list(own[key][1].shape)}"
        for key, value in found.items()
        if value is None
    ]
    if missing or left_over or misshapen:
        raise ConversionError(
            f"the weights are not those of this {type(model).__name__}: missing {some(missing)};"
            f" unexpected {some(left_over)}; of another shape {some(misshapen)}"
        )
    if others := of_another_kind(found, {key: value for key, (_, value) in own.items()}):
        raise ConversionError(
            "the weights have tensors whose kind of numbers differs from this"
            f" {type(model).__name__}'s: {some(others)}"
        )
    return found


def _family_of(model: nn.Module) -> Family:
    for family in _ALL:
        if family.takes(model):
            return family if family.fitting is None else family.fitting(model)
    accepted = ", ".join(family.model_name() for family in _ALL)
    raise ConversionError(
        f"no release is known for {type(model).__name__}; there are releases for {accepted}"
    )


def _names(family: Family, key: str) -> tuple[str, ...]:
    names = family.released_name(key)
    return (names,) if isinstance(names, str) else names


def _fitted(values: Sequence[Tensor], to: Tensor) -> Tensor | None:
    """The values as one tensor of the parameter's shape, or None where they do not fit.

    A single one may have other axes of size 1 than the parameter.
    """
    first, *others = values
    if any(other.shape != first.shape for other in others):
        return None
    if not others:
        value = first.reshape(to.shape) if _sides(first) == _sides(to) else first
    else:
        if to.ndim <= first.ndim and not first.ndim:  # numbers have no axis to be put together on
            return None
        value = torch.stack(list(values)) if to.ndim > first.ndim else torch.cat(list(values))
    return value if value.shape == to.shape else None


def _sides(x: Tensor) -> list[int]:
    """The sizes of the axes along which there is more than one value."""
    return [size for size in x.shape if size != 1]
