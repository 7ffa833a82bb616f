"""Weights of a classifier for the backbone of a dense model, of any image size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from timm.models import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as vision_transformer_weights
from torch import Tensor, nn

from vision_ttt.models.fitted_weights import checkpoint_filter_fn, classifier_weights
from vision_ttt.models.linear_vit import INNER, LinearViT
from vision_ttt.models.number_kinds import of_another_kind
from vision_ttt.models.plain_backbone import PlainBackbone

CLASSIFIER_PARTS = ("norm", "fc_norm", "neck", "head", "head_dist", "fc", "classifier")
"""Modules of a classifier after its last block: its final norm, what pools, and its head.

Those that timm's description of the model names are left out, too.
"""


_DROPPED = "cls_token"
"""What a ViT's linear counterpart may have no place for."""


class BackboneLoad(NamedTuple):
    """What was done with the weights of a classifier. The names are those of tensors."""

    taken: tuple[str, ...]
    """Copied into the backbone."""
    interpolated: tuple[str, ...]
    """Those of ``taken`` that were interpolated to the backbone's size."""
    left_out: tuple[str, ...]
    """Weights for which the backbone has no tensor."""
    kept: tuple[str, ...] = ()
    """Tensors of the backbone that kept their values: inner models that a ViT's weights lack, and
    with ``allow_unmatched`` any others."""


def load_backbone(
    backbone: nn.Module,
    weights: Mapping[str, Tensor],
    source: str,
    *,
    allow_unmatched: bool = False,
) -> BackboneLoad:
    """Copy the weights of a classifier into a backbone without its final norm and head.

    Position embeddings of another size are interpolated; of timm's VisionTransformer, patch
    embeddings too. The final norm and head are left out, where the backbone has none. A ViT's
    weights fit its linear counterpart, whose inner models keep their values.

    Args:
        backbone: e.g. that of a :class:`vision_ttt.dense.ViTAdapter`.
        weights: a state dict of the model that the backbone was made of.
        source: where they come from, for messages.
        allow_unmatched: leave out all weights that do not fit, and let tensors of the backbone
            without weights keep their values.

    Raises:
        ValueError: names, shapes or kinds of numbers do not fit; lists them all. The backbone is
            unchanged.
    """
    taken, load = fit_backbone(backbone, weights, source, allow_unmatched=allow_unmatched)
    backbone.load_state_dict(taken, strict=False)
    return load


def fit_backbone(
    backbone: nn.Module,
    weights: Mapping[str, Tensor],
    source: str,
    *,
    allow_unmatched: bool = False,
) -> tuple[dict[str, Tensor], BackboneLoad]:
    """The tensors that :func:`load_backbone` copies, by their names in the backbone, uncopied."""
    own = backbone.state_dict()
    new: set[str] = set()
    without_place: list[str] = []
    if isinstance(backbone, PlainBackbone):
        weights = classifier_weights(weights, backbone)
    try:
        if isinstance(backbone, LinearViT) and backbone.can_inherit(weights):
            weights, without_place = backbone.inherited(weights)
            new = {name for name in own if INNER in name}
        fitted = _fitted(backbone, weights)
    except ValueError as error:
        if not allow_unmatched:
            raise ValueError(f"{source} does not fit the backbone: {error}") from error
        fitted = dict(weights)
    # Of the weights as they come: fitting may convert them.
    if others := of_another_kind(weights, own):
        raise ValueError(
            f"{source} has tensors whose kind of numbers differs from the backbone's: "
            f"{_listed(others)}"
        )
    surplus = [name for name in fitted if name not in own]
    misshapen = [name for name, x in fitted.items() if name in own and own[name].shape != x.shape]
    missing = [name for name in own if name not in fitted and name not in new]
    head = (getattr(backbone, "pretrained_cfg", None) or {}).get("classifier") or ()
    parts = (*CLASSIFIER_PARTS, *((head,) if isinstance(head, str) else head))
    unexpected = [
        name
        for name in (*surplus, *(name for name in without_place if name != _DROPPED))
        if not name.startswith(tuple(f"{part}." for part in parts))
    ]
    if (missing or misshapen or unexpected) and not allow_unmatched:
        shapes = [
            f"{name} {list(fitted[name].shape)} for {list(own[name].shape)}" for name in misshapen
        ]
        raise ValueError(
            f"{source} does not fit the backbone {type(backbone).__name__}: missing"
            f" {_listed(missing)}; unexpected {_listed(unexpected)}; of another shape"
            f" {_listed(shapes)}"
        )
    rejected = {*surplus, *misshapen}
    taken = {name: x for name, x in fitted.items() if name not in rejected}
    return taken, BackboneLoad(
        taken=tuple(taken),
        interpolated=tuple(
            name for name, x in taken.items() if name in weights and weights[name].shape != x.shape
        ),
        left_out=(*(name for name in fitted if name in rejected), *without_place),
        kept=tuple(name for name in own if name not in taken),
    )


def _fitted(backbone: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with position embeddings, and what else depends on sizes, of the backbone's."""
    if isinstance(backbone, VisionTransformer):
        return vision_transformer_weights(dict(weights), backbone)
    if isinstance(backbone, PlainBackbone):
        return checkpoint_filter_fn(weights, backbone)
    return dict(weights)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
