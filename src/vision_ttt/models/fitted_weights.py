"""Weights fitted to a plain classifier: those of a segmenter, and those of another image size."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt, prod

from timm.layers import to_2tuple
from torch import Tensor, nn

from vision_ttt.models.image_size import positions_for
from vision_ttt.models.number_kinds import of_another_kind
from vision_ttt.pretrained import weights_path

_BACKBONE = "maps.backbone."
_PRETRAINED = "backbone."
_OF_PRETRAINING = ("decoder.", "projection.", "criterion.")
"""What the other weights of a pre-trained backbone's file begin with."""
_HEAD = ("head.weight", "head.bias")


def classifier_weights(state_dict: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Name the weights of a linear segmenter, or of a pre-training, as the classifier's.

    The segmenter's 1 × 1 convolution [K, D, 1, 1] on the tokens is the classifier's linear layer
    [K, D] on their mean: the mean of the tokens' logits is the logits of the mean. Of a
    pre-training, the backbone's weights are returned without its mask token. Other weights are
    returned as they are, and so are a segmenter's for a model that pools class tokens: the layer
    has not seen any.

    Args:
        state_dict: e.g. of a :class:`vision_ttt.dense.LinearSegmenter`, or of the tasks dino and
            masked-images.
        model: a :class:`vision_ttt.models.plain_backbone.PlainBackbone`.
    """
    if state_dict and all(key.startswith((_PRETRAINED, *_OF_PRETRAINING)) for key in state_dict):
        own = {key.removeprefix(_PRETRAINED): state_dict[key] for key in state_dict}
        return {
            key: own[key] for key in own if not key.startswith(("mask_token", *_OF_PRETRAINING))
        }
    backbone = {key for key in state_dict if key.startswith(_BACKBONE)}
    is_linear_segmenter = bool(backbone) and state_dict.keys() - backbone == set(_HEAD)
    if not is_linear_segmenter or model.class_tokens is not None:
        return dict(state_dict)
    weight, bias = (state_dict[key] for key in _HEAD)
    named = {key.removeprefix(_BACKBONE): state_dict[key] for key in state_dict if key in backbone}
    return {**named, _HEAD[0]: weight.flatten(1), _HEAD[1]: bias}


def pretrained_filter_fn(state_dict: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Fit weights to a model that timm builds with ``pretrained=True``.

    As :func:`checkpoint_filter_fn`, with the grid that the weights' description tells.
    """
    return checkpoint_filter_fn(state_dict, model, _described_grid(model))


def _described_grid(model: nn.Module) -> tuple[int, int] | None:
    """The token grid of the weights in the package or a folder that a model is built of, or None.

    Other weights, those of an overlay, are not the described ones.
    """
    cfg = model.pretrained_cfg
    packaged = cfg.get("file") == weights_path(f"{cfg['architecture']}.{cfg.get('tag')}")
    if cfg.get("state_dict") or not (packaged or cfg.get("source")):
        return None
    size = model.pretrained_model_args.get("img_size", cfg["input_size"][-2:])
    return tuple(model.patch_embed.dynamic_feat_size(to_2tuple(size)))


def checkpoint_filter_fn(
    state_dict: Mapping[str, Tensor],
    model: nn.Module,
    described_grid: tuple[int, int] | None = None,
) -> dict[str, Tensor]:
    """Fit weights of a segmenter or of another image size to a model, as timm's loading asks.

    See :func:`classifier_weights`; ``pos_embed`` is interpolated to the model's grid.

    Args:
        state_dict: the weights.
        model: a :class:`vision_ttt.models.plain_backbone.PlainBackbone`.
        described_grid: grid of the weights' tokens, used if it fits their number. Otherwise the
            function assumes the model's grid if the numbers of tokens are equal, and a square grid
            if they differ.

    Raises:
        ValueError: the weights' token grid is neither described nor the model's nor square: its
            sides are unknown; or their kind of numbers differs from the model's.
    """
    state_dict = classifier_weights(state_dict, model)
    positions, own = state_dict.get("pos_embed"), model.pos_embed
    if positions is None or own is None:
        return state_dict
    tokens, grid = positions.shape[1], tuple(model.patch_embed.grid_size)
    former = described_grid
    if former is None or prod(former) != tokens:
        former = grid if tokens == own.shape[1] else (isqrt(tokens), isqrt(tokens))
    if prod(former) != tokens:
        raise ValueError(
            f"pos_embed has {tokens} tokens, which is not a square grid; load it into a model of"
            " its own img_size and call set_input_size for another"
        )
    if former != grid:
        if others := of_another_kind({"pos_embed": positions}, {"pos_embed": own}):
            raise ValueError(f"the kind of numbers differs from the model's: {others[0]}")
        # Weights may be stored in half precision, of which interpolation would lose more.
        state_dict["pos_embed"] = positions_for(grid, positions.to(own.dtype), former)
    return state_dict
