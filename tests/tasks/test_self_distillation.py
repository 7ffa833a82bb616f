"""Self-distillation: the loss, when it begins, and a run that is resumed within it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from interrupted_runs import train_until
from vision_ttt.engine import ConfigError, train
from vision_ttt.engine.task import Moment
from vision_ttt.recipes import resolve

Fields = Callable[..., dict]
DISTILS = {"self_distillation": 0.7, "ema_decay": 0.9, "label_smoothing": 0.2}


@pytest.mark.parametrize("mixes", [False, True])
def test_the_loss_is_the_papers(tiny_fields: Fields, mixes: bool) -> None:
    config = resolve(tiny_fields(**DISTILS, mixup=0.8 if mixes else 0.0))
    task = config.task.open(config)
    torch.manual_seed(0)
    model, average = (
        task.build_model(config.model.name, task.model_arguments()).eval() for _ in range(2)
    )
    for each in (model, average):
        nn.init.normal_(each.head.weight)  # zero at the start
    images = torch.randn(4, 3, 32, 32)
    batch = {"images": images, "targets": torch.tensor([0, 1, 1, 0]), "indices": torch.arange(4)}
    batch = task.augment(batch)
    logits = model(batch["images"])
    # Mixing smooths the targets itself.
    smoothing = 0.0 if mixes else 0.2
    plain = F.cross_entropy(logits, batch["targets"], label_smoothing=smoothing, reduction="sum")
    soft = average(batch["images"]).softmax(dim=1)
    distilled = plain - 0.7 * (soft * logits.log_softmax(dim=1)).sum()
    for done, expected in ((0.0, plain), (0.2499, plain), (0.25, distilled), (0.9, distilled)):
        loss, count = task.loss(model, batch, Moment(done, average))
        assert count == 4
        torch.testing.assert_close(loss, expected)
    assert abs(distilled - plain) > 0.1
    loss.backward()
    assert all(weight.grad is None for weight in average.parameters())


def test_a_batch_without_an_image_is_of_the_graph(tiny_fields: Fields) -> None:
    config = resolve(tiny_fields(**DISTILS))
    task = config.task.open(config)
    model = task.build_model(config.model.name, task.model_arguments())
    empty = {"images": torch.empty(0, 3, 32, 32), "targets": torch.empty(0, dtype=torch.int64)}
    loss, count = task.loss(model, empty, Moment(0.5, model))
    assert (loss.item(), count) == (0.0, 0)
    loss.backward()
    assert model.head.weight.grad is not None


def test_resumed_it_is_the_same_run(tiny_fields: Fields, tmp_path: Path) -> None:
    plain = train(
        resolve(
            tiny_fields(**{**DISTILS, "self_distillation": 0.0}, output=str(tmp_path / "plain"))
        )
    )
    fields = tiny_fields(**DISTILS)
    whole = train(resolve({**fields, "output": str(tmp_path / "whole")}))
    config = resolve({**fields, "output": str(tmp_path / "parts"), "checkpoint_every": 3})
    train_until(config, 4)
    resumed = train(config, resume=True)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name])
    assert whole.metrics["test_loss"] != plain.metrics["test_loss"]


def test_it_needs_an_average(tiny_fields: Fields) -> None:
    with pytest.raises(ConfigError, match=r"self_distillation is 1.0; .* ema_decay must be above"):
        resolve(tiny_fields(self_distillation=1.0))
    with pytest.raises(ConfigError, match=r"self_distillation_start is 1.0; it must be from 0 to"):
        resolve(tiny_fields(self_distillation_start=1.0))
    with pytest.raises(ConfigError, match=r"self_distillation_start is 0.5; it must be 0.25, as"):
        resolve(tiny_fields(self_distillation_start=0.5))
