"""The model that self-distillation trains: a backbone with a projection, and the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from vision_ttt.tasks.images.pretraining import PretrainedBackbone, build_pretrained

OUTPUTS = "outputs"
"""The argument of :func:`build_dino` beside the backbone's."""
_HIDDEN, _BOTTLENECK = 2048, 256


class Projection(nn.Module):
    """Features [B, D] → outputs [B, K]: three layers, and cosines to K directions (DINO, Sec. 3.1).

    Args:
        dim: D.
        outputs: K.

    Initialisation: weights normal with standard deviation 0.02, directions 1, biases zero.

    Attributes:
        center: running mean of a teacher's outputs [K].
    """

    def __init__(self, dim: int, outputs: int) -> None:
        super().__init__()
        hidden, bottleneck = min(_HIDDEN, 4 * dim), min(_BOTTLENECK, 2 * dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden),
            *(nn.GELU(), nn.Linear(hidden, hidden)),
            *(nn.GELU(), nn.Linear(hidden, bottleneck)),
        )
        for layer in self.mlp[::2]:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.directions = nn.Parameter(nn.init.trunc_normal_(torch.empty(outputs, bottleneck)))
        self.register_buffer("center", torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(self.mlp(x), dim=-1), F.normalize(self.directions, dim=-1))

    def move_center(self, outputs: Tensor, momentum: float) -> None:
        """Move the center towards the mean of a teacher's outputs [B, K], of all processes.

        Outputs that are not finite move nothing: the update that they belong to is not made.
        """
        total = torch.cat((outputs.sum(0), outputs.new_tensor([len(outputs)])))
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(total)
        mean = total[:-1] / total[-1].clamp(min=1)
        moved = torch.lerp(mean, self.center, momentum)
        self.center.copy_(torch.where(moved.isfinite().all(), moved, self.center))


class DinoModel(PretrainedBackbone):
    """Images [B, C, H, W] → the mean of their tokens [B, D]; or crops → their outputs.

    Args:
        backbone: with `dynamic_img_size`, for crops of two sizes.
        outputs: K.

    Raises:
        TypeError: the backbone is not plain.
    """

    def __init__(self, backbone: nn.Module, outputs: int) -> None:
        super().__init__(backbone)
        self.projection = Projection(backbone.embed_dim, outputs)

    def forward(self, x: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """Features of images, or the outputs [B, n, K] of each tensor of crops [B, n, C, H, W]."""
        if isinstance(x, Tensor):
            return self.backbone.split_tokens(self.backbone.forward_features(x))[0].mean(1)
        features = [self(crops.flatten(0, 1)) for crops in x]
        outputs = self.projection(torch.cat(features)).split([len(each) for each in features])
        pairs = zip(outputs, x, strict=True)
        return [each.unflatten(0, tuple(crops.shape[:2])) for each, crops in pairs]


def build_dino(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Build the model around a backbone of no classes, randomly initialised.

    Raises:
        ConfigError: there is no such model, it does not accept the arguments or is not plain.
    """
    own = {key: value for key, value in arguments.items() if key != OUTPUTS}
    own |= {"num_classes": 0}
    if name != "linear_vit":  # which accepts any size
        own |= {"dynamic_img_size": True}
    return build_pretrained(lambda each: DinoModel(each, arguments[OUTPUTS]), name, own)


def crop_losses(student: Sequence[Tensor], teacher: Tensor) -> Tensor:
    """The loss of each image [B]: the mean cross-entropy of pairs of different crops.

    Args:
        student: log-probabilities of large crops [B, 2, K], and of small ones [B, n, K] if any.
        teacher: probabilities of the large crops [B, 2, K].
    """
    both = torch.cat(list(student), dim=1)  # [B, 2 + n, K]
    entropies = -torch.einsum("btk,bsk->bts", teacher, both)
    same = torch.eye(*entropies.shape[1:], dtype=torch.bool, device=both.device)
    return entropies[:, ~same].mean(1)
