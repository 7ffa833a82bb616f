"""The figures of a classifier are those of scikit-learn and of definitions."""

import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from vision_ttt.tasks.classification.task import summarise


def test_figures_of_two_unequal_classes() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(60, 2), (torch.rand(60) < 0.2).long()
    own = summarise(logits, targets)
    assert own.balanced_accuracy == pytest.approx(balanced_accuracy_score(targets, own.predictions))
    assert own.balanced_accuracy != pytest.approx(own.accuracy, abs=1e-3)
    assert own.roc_auc == pytest.approx(roc_auc_score(targets, logits[:, 1] - logits[:, 0]))


def test_a_class_without_images_is_not_counted() -> None:
    own = summarise(torch.eye(3)[[0, 0, 1, 1]], torch.tensor([0, 0, 1, 0]))
    assert own.balanced_accuracy == pytest.approx((2 / 3 + 1) / 2)
    assert own.roc_auc is None
    assert summarise(torch.eye(2), torch.tensor([0, 0])).roc_auc is None
