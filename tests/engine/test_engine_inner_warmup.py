"""The warm-up of TTT-MLP's inner learning rates, in the loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from interrupted_runs import train_until
from vision_ttt.engine import TrainConfig, train
from vision_ttt.engine.config import ConfigError
from vision_ttt.engine.optimisation import Length, make_inner_warmup
from vision_ttt.engine.step import Step
from vision_ttt.layers import TTTMLP, TTTLinear
from vision_ttt.recipes import resolve

Fields = Callable[..., dict[str, Any]]
MLP = {"depth": 1, "embed_dim": 32, "num_heads": 1, "inner_model": "mlp"}


def inner_rates(model: nn.Module) -> set[float]:
    """The share of the full inner rates in each layer."""
    return {layer.warmup.item() for layer in model.modules() if isinstance(layer, TTTMLP)}


def _of_eight(config: TrainConfig) -> Length:
    """The length of a run of eight updates an epoch."""
    return Length.of(config.optimisation, updates_per_epoch=8, units_per_item=1)


def test_rates_rise_linearly_to_full() -> None:
    models = [nn.Sequential(TTTMLP(8, 2)), nn.Sequential(TTTMLP(8, 2))]
    config = resolve({"task": "classification", "epochs": 10, "inner_warmup": 0.5, "warmup": 0})
    warm_up = make_inner_warmup(models, config, _of_eight(config))
    seen = []
    for update in range(6):
        warm_up(update)
        assert inner_rates(models[0]) == inner_rates(models[1])
        seen += inner_rates(models[0])
    assert seen == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_run_warms_up_and_resumes_as_the_same_run(
    tiny_fields: Fields, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, step = [], Step.__call__

    def watch(self: Step, *args: Any) -> Any:
        seen.extend(inner_rates(self.model))
        return step(self, *args)

    monkeypatch.setattr(Step, "__call__", watch)
    fields = {"arguments": MLP, "inner_warmup": 1.5, "ema_decay": 0.9}
    whole = train(resolve(tiny_fields(**fields, output=str(tmp_path / "whole"))))
    wanted = [min(1.0, update / 6) for update in range(8)]
    assert seen == pytest.approx(wanted)
    assert inner_rates(whole.model) == {1.0}

    config = resolve(tiny_fields(**fields, output=str(tmp_path / "run")))
    train_until(config, 5)
    seen.clear()
    resumed = train(config, resume=True)  # from the end of the first epoch
    assert seen == pytest.approx(wanted[4:])
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], weight), name


def test_without_warm_up_rates_are_full() -> None:
    model = nn.Sequential(TTTMLP(8, 2))
    config = resolve({"task": "classification"})
    make_inner_warmup([model], config, _of_eight(config))(0)
    assert inner_rates(model) == {1.0}


def test_what_cannot_warm_up_says_so() -> None:
    config = resolve({"task": "classification", "inner_warmup": 1})
    with pytest.raises(ConfigError, match=r"inner_warmup is 1\.0; vittt\S+ .* no TTT-MLP"):
        make_inner_warmup([nn.Sequential(TTTLinear(8, 2))], config, _of_eight(config))
    with pytest.raises(ConfigError, match=r"inner_warmup is 3\.0; it must be at most epochs"):
        resolve({"task": "classification", "epochs": 2, "warmup": 0, "inner_warmup": 3})
