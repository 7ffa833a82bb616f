"""The model that self-distillation trains: a backbone with lightly's projection head and loss."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightly.loss import DINOLoss
from lightly.models.modules.heads import DINOProjectionHead
from torch import Tensor, distributed, nn

from vision_ttt.tasks.dino.config import DinoSection
from vision_ttt.tasks.images.pretraining import PretrainedBackbone, build_pretrained


class CropLoss(DINOLoss):
    """Cross-entropy between the outputs of different crops, by lightly; the caller moves `center`.

    lightly moves the center by each batch that the loss is computed of, in evaluation, too.
    """

    def update_center(self, teacher_out: Tensor) -> None:
        """Leave the center: :meth:`move_center` moves it."""

    @torch.no_grad()
    def move_center(self, outputs: Tensor) -> None:
        """Move the center towards the mean of the teacher's outputs [N, K] in all processes.

        Processes may have different numbers of outputs, or none. Outputs that are not finite move
        nothing: the update that they belong to is not made.
        """
        total = torch.cat((outputs.sum(0), outputs.new_tensor([len(outputs)])))
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(total)
        mean = torch.where(total[-1] > 0, total[:-1] / total[-1], self.center[0, 0])
        moved = torch.lerp(mean, self.center[0, 0], self.center_momentum)
        self.center.copy_(torch.where(moved.isfinite().all(), moved, self.center))


class DinoModel(PretrainedBackbone):
    """Images [B, C, H, W] → the mean of their tokens [B, D]; or crops → outputs of the projection.

    Args:
        backbone: accepts images of the crops' sizes.
        section: of the config; describes head and loss.

    Raises:
        TypeError: the backbone is not plain.
    """

    def __init__(self, backbone: nn.Module, section: DinoSection) -> None:
        super().__init__(backbone)
        with warnings.catch_warnings():  # of the weight norm that is replaced below
            warnings.simplefilter("ignore", FutureWarning)
            self.projection = DINOProjectionHead(
                *(backbone.embed_dim, section.hidden_dim, section.bottleneck_dim, section.outputs)
            )
        # The moving average is a copy of the model, and modules with the older weight norm cannot
        # be copied.
        last = nn.utils.remove_weight_norm(self.projection.last_layer)
        norms = nn.utils.parametrizations.weight_norm(last).parametrizations.weight.original0
        nn.init.ones_(norms).requires_grad_(False)
        self.criterion = CropLoss(
            section.outputs,
            student_temp=section.student_temperature,
            center_momentum=section.center_momentum,
        )

    def forward(self, x: Tensor | Sequence[Tensor]) -> Tensor:
        """Features of images, or the outputs [B, n, K] of all n crops, in tensors [B, …, C, H, W].

        The crops of a tensor are of one size.
        """
        if isinstance(x, Tensor):
            return self.backbone.split_tokens(self.backbone.forward_features(x))[0].mean(1)
        features = [self(crops.flatten(0, 1)).unflatten(0, crops.shape[:2]) for crops in x]
        every = torch.cat(features, dim=1)  # [B, n, D]
        return self.projection(every.flatten(0, 1)).unflatten(0, every.shape[:2])


def build_dino(name: str, arguments: Mapping[str, Any], section: DinoSection) -> nn.Module:
    """Build the model around a backbone of no classes, randomly initialised.

    Raises:
        ConfigError: there is no such model, it does not accept the arguments or is not plain.
    """
    own = {**arguments, "num_classes": 0, "dynamic_img_size": True}
    return build_pretrained(lambda backbone: DinoModel(backbone, section), name, own)
