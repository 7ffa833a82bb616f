"""Layers that stay as they are while the rest of a model is fine-tuned."""

from typing import Literal

from timm.models import group_parameters
from torch import nn

from vision_ttt.engine.config import ConfigError
from vision_ttt.engine.optimisation import new_parameters


def freeze_layers(model: nn.Module, count: int | Literal["all", "inherited"]) -> None:
    """Switch the gradients of the first `count` layers of `model.group_matcher()` off.

    Layers are those of layer decay: the patch embedding with positions first, then the blocks. The
    head, which `model.get_classifier()` returns, is never frozen. "inherited" freezes all but the
    head and what the model calls new.

    Raises:
        ConfigError: the model does not name its layers, has no head, fewer layers or nothing new.
    """
    if not count:
        return
    if not hasattr(model, "group_matcher") or not hasattr(model, "get_classifier"):
        raise ConfigError(
            f"frozen_layers: {type(model).__name__} does not name its layers and its head"
            " (group_matcher, get_classifier)"
        )
    layer_of = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
    heads = model.get_classifier()  # a tuple of two where a model is distilled
    heads = heads if isinstance(heads, tuple | list) else (heads,)
    head = {id(weight) for each in heads for weight in each.parameters()}
    if not head:
        raise ConfigError(f"frozen_layers: {type(model).__name__} has no head to train")
    others = [each for each in model.named_parameters() if id(each[1]) not in head]
    new = new_parameters(model) if count == "inherited" else set()
    if count == "inherited" and not new:
        raise ConfigError(
            f"frozen_layers is inherited, but {type(model).__name__} has no new parameters; only"
            " linear_vit has some"
        )
    layers = 1 + max(layer_of[name] for name, _ in others)
    if isinstance(count, int) and count > layers:
        raise ConfigError(
            f"frozen_layers is {count}, but {type(model).__name__} has {layers} beside its"
            f" head; it must be from 0 to {layers}, or all, or inherited"
        )
    for name, weight in others:
        whole = count == "all" or (count == "inherited" and name not in new)
        if whole or (isinstance(count, int) and layer_of[name] < count):
            weight.requires_grad_(False)


def training_mode(model: nn.Module) -> None:
    """Set `model` to training mode, its frozen parts to evaluation mode.

    Frozen parts thus have no dropout and no stochastic depth, and keep their running statistics.
    """
    model.train()
    for module in model.modules():
        weights = list(module.parameters())
        if weights and not any(weight.requires_grad for weight in weights):
            module.eval()
