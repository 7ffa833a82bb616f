"""Grad-CAM of any backbone here, computed by the package grad-cam (extra [explain])."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from studies.deletion.gradient_input import check_classes, logits_of
from vision_ttt.explain.feature_maps import token_grid
from vision_ttt.explain.inner_loop import refuse_without_gradients
from vision_ttt.extras import require
from vision_ttt.models.plain_backbone import PlainBackbone


def grad_cam(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """Grad-CAM (Selvaraju et al., 2017) on the token grid, by ``pytorch_grad_cam.GradCAM``::

        map = max(0, Σ_d w_d a_d)        w_d = mean over tokens of ∂logit / ∂a_d

    a are the features that go into the last block of a plain backbone or VisionTransformer: of its
    output the class token alone need matter. For stages of maps a is the last stage's output.
    Class tokens and registers are left out.

    The work is done in float32 on a copy of the model, as the package clears gradients and changes
    modes: the model is not modified.

    Args:
        model: a classifier: a plain backbone of two blocks or more or H-ViT³ of this package,
            timm's VisionTransformer, ResNet and others whose last stage returns maps [B, D, h, w].
        images: [B, C, H, W], normalised as for the model.
        classes: [B], the class of each image whose logit is explained.

    Returns:
        Maps [B, h, w] on the grid of these features, float32, each from 0 to 1 (the package scales
        every map; one without any positive token is 0 throughout).

    Raises:
        MissingPackageError: grad-cam is not installed.
        TypeError: the model is not such a classifier, or is one of ``for_inference``.
        ValueError: the images do not fit the model, or there is not one class of the model for each
            of them.
        RuntimeError: called within ``torch.inference_mode``.
    """
    refuse_without_gradients(model)
    require("explain", "Grad-CAM")
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    grid, _ = token_grid(model, images)
    model = copy.deepcopy(model).eval().float().requires_grad_()
    if hasattr(model, "set_grad_checkpointing"):  # recomputed layers would be recorded twice
        model.set_grad_checkpointing(False)
    images = images.detach().float()
    with torch.no_grad():
        check_classes(classes, logits_of(model, images))
    layer, to_maps = _layer(model, grid)

    class OnTheGrid(GradCAM):
        def get_target_width_height(self, input_tensor: Tensor) -> tuple[int, int]:
            """The package would stretch maps to the image's size."""
            return grid[1], grid[0]

    # Not as a context manager, which hides errors; the hooks are on the copy and go with it.
    method = OnTheGrid(model, [layer], to_maps)
    with torch.enable_grad():
        maps = method(images, [ClassifierOutputTarget(label) for label in classes.tolist()])
    return torch.from_numpy(maps).to(images)


def _layer(model: nn.Module, grid: tuple[int, int]) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The layer whose output is explained, and how that becomes maps [B, D, h, w]."""
    if isinstance(model, PlainBackbone | VisionTransformer):
        if len(model.blocks) < 2:
            raise TypeError("Grad-CAM explains what goes into the last block of two or more; got 1")

        def image_tokens(x: Tensor) -> Tensor:
            if isinstance(model, PlainBackbone):
                return model.split_tokens(x)[0]
            return x[:, model.num_prefix_tokens :]

        return model.blocks[-2], lambda x: image_tokens(x).mT.unflatten(-1, grid)

    last = model.feature_info[-1]
    name, channels = last["module"], last["num_chs"]

    def maps(x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1:] != (channels, *grid):
            raise TypeError(
                f"{type(model).__name__}.{name} must return maps [B, {channels}, {grid[0]}, "
                f"{grid[1]}], got {list(x.shape)}"
            )
        return x

    return model.get_submodule(name), maps
