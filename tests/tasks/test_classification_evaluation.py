"""The figures of a classifier are those of scikit-learn and of definitions."""

from types import SimpleNamespace

import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from vision_ttt.tasks.classification.task import Classification, summarise


def test_figures_of_two_unequal_classes() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(60, 2), (torch.rand(60) < 0.2).long()
    own = summarise(logits, targets)
    assert own.balanced_accuracy == pytest.approx(balanced_accuracy_score(targets, own.predictions))
    assert own.balanced_accuracy != pytest.approx(own.accuracy, abs=1e-3)
    assert own.roc_auc == pytest.approx(roc_auc_score(targets, logits[:, 1] - logits[:, 0]))


def test_logits_whose_probabilities_round_to_1_have_an_order() -> None:
    logits = torch.tensor([[0.0, 20.0], [0.0, 30.0]])
    assert summarise(logits, torch.tensor([0, 1])).roc_auc == 1.0


def test_a_class_without_images_is_not_counted() -> None:
    own = summarise(torch.eye(3)[[0, 0, 1, 1]], torch.tensor([0, 0, 1, 0]))
    assert own.balanced_accuracy == pytest.approx((2 / 3 + 1) / 2)
    assert own.roc_auc is None
    assert summarise(torch.eye(2), torch.tensor([0, 0])).roc_auc is None


@pytest.mark.parametrize(("classes", "shown"), [(5, False), (6, True)])
def test_the_table_leaves_out_a_top_5_of_all_classes(classes: int, shown: bool) -> None:
    task = SimpleNamespace(classes=[str(index) for index in range(classes)])
    evaluation = summarise(torch.eye(classes), torch.arange(classes))
    table = Classification.table(task, "", Classification.figures(task, evaluation))
    assert ("top-5" in table.columns[0].cells) is shown
