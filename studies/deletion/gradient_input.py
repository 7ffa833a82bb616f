"""Gradient × input: what each token's pixels contribute to a logit, to first order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vision_ttt.explain.feature_maps import token_grid
from vision_ttt.explain.inner_loop import refuse_without_gradients
from vision_ttt.explain.token_pixels import spread
from vision_ttt.models.evaluation_mode import evaluation_mode


def gradient_times_input(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """x · ∂logit / ∂x, summed over the pixels and channels of each token.

    To first order it is the change of the logit of the image's class when the token's pixels go
    from zero, the mean of normalised images, to what they are. For a linear model the map's sum is
    the logit without its bias. Negative tokens speak against the class.

    Args:
        model: a classifier with a known token grid: a plain backbone or H-ViT³ of this package,
            timm's VisionTransformer, ResNet and others. It is not modified.
        images: [B, C, H, W], normalised as for the model.
        classes: [B], the class of each image whose logit is explained.

    Returns:
        Maps [B, h, w] on the grid of the last features, float32.

    Raises:
        TypeError: the token grid is not known, or the model has no gradients, as one of
            ``for_inference``.
        ValueError: the images do not fit the model, or there is not one class of the model for each
            of them.
        RuntimeError: called within ``torch.inference_mode``.
    """
    refuse_without_gradients(model)
    grid, step = token_grid(model, images)
    pixels = images.detach().clone().requires_grad_()
    with evaluation_mode(model), torch.enable_grad():
        logits = logits_of(model, pixels)
        check_classes(classes, logits)
        chosen = logits.float().gather(1, classes.to(logits.device)[:, None]).sum()
        if not chosen.requires_grad:
            raise TypeError(f"{type(model).__name__} has no gradients: give the trained model")
        (gradient,) = torch.autograd.grad(chosen, pixels)
    products = (gradient.float() * images.detach().float()).sum(1)  # [B, H, W]
    return token_sums(products, grid, step)


def token_sums(x: Tensor, grid: Sequence[int], patch: Sequence[int]) -> Tensor:
    """The sum over each token's pixels: [B, H, W] → [B, h, w].

    Args:
        x: a number of each pixel.
        grid: h and w.
        patch: rows and columns of pixels from token to token.
    """
    rows, columns = grid
    numbers = torch.arange(rows * columns, device=x.device).view(1, rows, columns)
    token_of_pixel = spread(numbers, x.shape[1:], patch).flatten()
    sums = x.new_zeros(len(x), rows * columns).index_add(1, token_of_pixel, x.flatten(1))
    return sums.unflatten(1, (rows, columns))


def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    """Logits [B, classes].

    Raises:
        TypeError: the model returns something else.
        ValueError: the images do not fit the model.
    """
    try:
        logits = model(images)
    except AssertionError as error:  # timm's models check sizes by assertions
        raise ValueError(f"the images do not fit the model: {error}") from error
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(
            f"a classifier with logits [B, classes] is needed, {type(model).__name__} returns {got}"
        )
    return logits


def check_classes(classes: Tensor, logits: Tensor) -> None:
    """Check that there is a class of the model for each image.

    Raises:
        ValueError: there is not.
    """
    count, number = logits.shape
    whole = not (classes.is_floating_point() or classes.is_complex() or classes.dtype == torch.bool)
    if classes.shape != (count,) or not whole or ((classes < 0) | (classes >= number)).any():
        raise ValueError(
            f"classes must be {count} whole numbers from 0 to {number - 1}, got "
            f"{classes.tolist()} of {classes.dtype}"
        )
