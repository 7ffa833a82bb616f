"""A linear model from a ViT that one has."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from timm.models import get_model_args, is_model_pretrained
from timm.models._input import update_model_args, update_model_input_size
from torch import nn

from vision_ttt.models.linear_vit import NAME, LinearViT
from vision_ttt.models.vit_parts import check_vit, norm_argument


class Inheritance(NamedTuple):
    """Names of tensors: which a linear model has of its ViT, which are new, which had no place."""

    inherited: tuple[str, ...]
    """Tensors of the linear model with the ViT's values."""
    new: tuple[str, ...]
    """Tensors of the linear model that are to be learnt."""
    without_place: tuple[str, ...]
    """Tensors of the ViT that the linear model does not use."""

    def __str__(self) -> str:
        left = f" ({', '.join(self.without_place)})" if self.without_place else ""
        return (
            f"{len(self.inherited)} tensors inherited, {len(self.new)} new,"
            f" {len(self.without_place)} without a place{left}"
        )


def linearize(model: nn.Module, inner: str = "swiglu", class_token: str = "drop") -> LinearViT:
    """A model of linear cost with the weights of a ViT, to be fine-tuned.

    Softmax attention is replaced by an inner model that is trained on the image's tokens. Each
    tensor that has a place is inherited: projections, norms, scales, MLPs, embeddings, the head.
    The inner models are new: before fine-tuning the result is no classifier. ::

        model = timm.create_model("deit_tiny_patch16_224.fb_in1k", pretrained=True)
        linear = vision_ttt.linearize(model)
        print(linear.inheritance)
        again = timm.create_model("linear_vit", **linear.arguments)   # the same, with other weights

    The recipe ``linearize`` fine-tunes one.

    Args:
        model: one of timm's plain ViTs, with adapters merged; it is not changed.
        inner: the inner model: "swiglu", "ttt_linear" (in both directions) or "vit3"; see
            :class:`vision_ttt.layers.TTTAttention`.
        class_token: "drop" or "keep"; see :class:`vision_ttt.models.LinearViT`.

    Returns:
        The model, in the mode, dtype and on the device of ``model``. All its parameters are
        trainable, those inherited from frozen ones too. Its attribute ``inheritance``
        says what was inherited, what is new and what had no place; ``arguments`` is what
        ``timm.create_model("linear_vit", …)`` needs to build it again, None for a ViT that
        ``timm.create_model`` has not built.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: its architecture is not known, with the reason; or an argument is not accepted.
    """
    check_vit(model)
    linear = LinearViT(copy.deepcopy(model), inner, class_token)
    weights, left = linear.inherited(model.state_dict())
    linear.load_state_dict(weights, strict=False)
    own = linear.state_dict()
    inherited = tuple(key for key in own if key in weights)
    new = tuple(key for key in own if key not in weights)
    linear.inheritance = Inheritance(inherited, new, tuple(left))
    if (given := _arguments(model)) is not None:
        # A ViT's own class_token, a truth value, says nothing more.
        update_model_args(linear, **{**given, "inner": inner, "class_token": class_token})
        update_model_input_size(linear, model.patch_embed.img_size)
    if described := getattr(model, "pretrained_cfg", None):
        linear.pretrained_cfg = linear.default_cfg = {**described, "architecture": NAME}
    return linear.requires_grad_(True).train(model.training)


def _arguments(model: nn.Module) -> dict[str, Any] | None:
    """A ViT's name and constructor arguments, None if ``timm.create_model`` has not built it."""
    described = getattr(model, "pretrained_cfg", None)
    if not described or not hasattr(model, "_model_args"):
        return None
    name, tag = described["architecture"], described.get("tag")
    tagged = f"{name}.{tag}"  # of a folder, any tag
    base = tagged if is_model_pretrained(tagged) else name
    return {**model._model_args, **get_model_args(model), **norm_argument(model), "base": base}
