"""Layers that stay as they are while the rest of a model is fine-tuned."""

from timm.models import group_parameters
from torch import nn

from vision_ttt.engine.config import ConfigError


def freeze_layers(model: nn.Module, count: int) -> None:
    """Switch the gradients of the first `count` layers of `model.group_matcher()` off.

    Layers are those of layer decay: the patch embedding with positions first, then the blocks. The
    classifier is never frozen.

    Raises:
        ConfigError: the model does not tell its layers, or has no classifier.
    """
    if not count:
        return
    if not hasattr(model, "group_matcher") or not hasattr(model, "get_classifier"):
        raise ConfigError(f"frozen_layers: {type(model).__name__} does not tell its layers")
    layer_of = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
    classifier = {id(weight) for weight in model.get_classifier().parameters()}
    if not classifier:
        raise ConfigError(f"frozen_layers: {type(model).__name__} has no classifier to train")
    for name, weight in model.named_parameters():
        if layer_of[name] < count and id(weight) not in classifier:
            weight.requires_grad_(False)


def training_mode(model: nn.Module) -> None:
    """Set `model` to training mode, its frozen parts to evaluation mode.

    So dropout, stochastic depth and running statistics rest where nothing learns.
    """
    model.train()
    for module in model.modules():
        weights = list(module.parameters())
        if weights and not any(weight.requires_grad for weight in weights):
            module.eval()
