"""What the features of a teacher are worth: the vote of nearest neighbours."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

NEIGHBOURS = 20
"""Training images that vote for a test image's class (DINO, App. F.1)."""
_HEAT = 0.07  # of their cosines
_CHUNK = 1024  # images whose similarities are in memory at once


@dataclass(frozen=True)
class DinoEvaluation:
    """What a teacher says of N test images."""

    loss: float
    """Mean cross-entropy between its own outputs of fixed crops."""
    neighbour_accuracy: float
    """Share of images that the vote of their 20 nearest training images classifies rightly."""

    @property
    def metrics(self) -> dict[str, float]:
        """Both."""
        return asdict(self)


def neighbour_accuracy(
    features: Tensor, targets: Tensor, known: Tensor, known_targets: Tensor
) -> float:
    """Share of images that the vote of their 20 nearest known images classifies rightly.

    A vote's weight is exp(cosine / 0.07).

    Args:
        features, targets: unit vectors [N, D] and classes [N] of images.
        known, known_targets: [M, D] and [M], likewise.
    """
    classes = int(max(targets.max(), known_targets.max())) + 1
    right = 0
    for some, wanted in zip(features.split(_CHUNK), targets.split(_CHUNK), strict=True):
        cosines, places = (some @ known.T).topk(min(NEIGHBOURS, len(known)))
        votes = torch.zeros(len(some), classes)
        votes.scatter_add_(1, known_targets[places], (cosines / _HEAT).exp())
        right += (votes.argmax(1) == wanted).sum().item()
    return right / len(features)
