"""The student that learns features: a backbone, and layers from its width to the teacher's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.engine.building import build_model
from vision_ttt.tasks.images.pretraining import PretrainedBackbone, build_pretrained


class FeatureStudent(PretrainedBackbone):
    """Images [B, C, H, W] → features for the teacher's, a list.

    Of "tokens" and "layers" they are maps [B, E, h, w], of the last block or of every one; of
    "pooled" there is the mean over the image tokens [B, E]. E is the teacher's width.

    Args:
        backbone: with or without a head, which is not used and frozen.
        match: "tokens", "layers" or "pooled".
        widths: E of each feature. Between layers of one width there is no projection.

    Raises:
        TypeError: the backbone is not plain.
        ValueError: there is not one width for each feature, or the backbone leaves patches out in
            training, and maps need all of them.
    """

    def __init__(self, backbone: nn.Module, match: str, widths: Sequence[int]) -> None:
        super().__init__(backbone)
        self.match = match
        count = len(backbone.blocks) if match == "layers" else 1
        if len(widths) != count:
            raise ValueError(
                f"the student has {count} features and the teacher {len(widths)}; match {match!r}"
                " needs as many"
            )
        if match != "pooled" and backbone.patch_drop_rate:
            raise ValueError(
                f"patch_drop_rate is {backbone.patch_drop_rate}; with match {match!r} it must be 0,"
                " as every token is compared"
            )
        if match == "layers":  # they are not normalised by the model
            backbone.norm.requires_grad_(False)
        dim = backbone.embed_dim
        self.projection = nn.ModuleList(
            nn.Identity() if match == "layers" and width == dim else nn.Linear(dim, width)
            for width in widths
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        if self.match == "pooled":
            tokens, _ = self.backbone.split_tokens(self.backbone.forward_features(x))
            return [self.projection[0](tokens.mean(1))]
        maps = self.backbone.forward_intermediates(
            x, len(self.projection), norm=self.match == "tokens", intermediates_only=True
        )
        pairs = zip(self.projection, maps, strict=True)
        return [project(each.movedim(1, -1)).movedim(-1, 1) for project, each in pairs]


def build_student(
    name: str, arguments: Mapping[str, Any], *, match: str, widths: Sequence[int]
) -> nn.Module:
    """Build a classifier for match "logits", or else a :class:`FeatureStudent`.

    Raises:
        ConfigError: there is no such model, it does not accept the arguments, or its features are
            not those that :class:`FeatureStudent` accepts.
    """
    if match == "logits":
        return build_model(name, arguments)
    return build_pretrained(lambda model: FeatureStudent(model, match, widths), name, arguments)


def distances(student: Tensor, teacher: Tensor, kind: str) -> Tensor:
    """The distance of each image [B] between features [B, E] or maps [B, E, h, w] of two models.

    The teacher's map is resized to the student's grid, bilinearly, where it has another. Features
    are compared token by token.

    Args:
        kind: "smooth_l1", of features of mean 0 and variance 1, or "cosine", 1 minus the cosine.
    """
    student, teacher = student.float(), teacher.float()
    if student.shape[2:] != teacher.shape[2:]:
        size = tuple(student.shape[2:])
        teacher = F.interpolate(teacher, size, mode="bilinear", antialias=True)
    student, teacher = (each.movedim(1, -1) for each in (student, teacher))
    if kind == "cosine":
        each = 1 - F.cosine_similarity(student, teacher, dim=-1)
    else:
        own, targets = (F.layer_norm(x, x.shape[-1:]) for x in (student, teacher))
        each = F.smooth_l1_loss(own, targets, reduction="none").mean(-1)
    return each if each.ndim == 1 else each.flatten(1).mean(1)
