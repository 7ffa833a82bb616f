"""NaN, infinity and a full disk stop a run; the message names the place, the checkpoint stays."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from vision_ttt.engine import NonFiniteError, TrainConfig, load_model, train
from vision_ttt.engine.faults import find_non_finite, stop_on_interrupt
from vision_ttt.engine.logs import RunLog

Fields = Callable[..., dict]


class _Poison(torch.autograd.Function):
    """Identity whose output or gradient is NaN."""

    @staticmethod
    def forward(context, values: Tensor, forward: bool) -> Tensor:
        context.forward_only = forward
        return values * float("nan") if forward else values.clone()

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * float("nan"), None


class _Net(nn.Module):
    def __init__(self, at: str) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        self.last = nn.Linear(2, 2)
        self.at = at

    def forward(self, values: Tensor) -> Tensor:
        values = self.inner(self.first(values))
        if self.at == "gradient":
            values = _Poison.apply(values, False)
        return self.last(values)


def _where(model: nn.Module, images: Tensor) -> str:
    model(images).sum().backward()
    return find_non_finite(model, lambda: model(images), images)


def test_place_of_the_first_non_finite_number() -> None:
    images = torch.ones(1, 2)
    assert _where(_Net(""), images * float("inf")) == "the batch of input images"
    model = _Net("")
    model.inner[0].register_forward_hook(lambda _m, _i, output: output * float("nan"))
    assert _where(model, images) == "the output of module 'inner.0'"
    # Backward reaches inner.0 first; `last`, above the poison, is finite.
    assert _where(_Net("gradient"), images) == "the gradient of parameter 'inner.0.bias'"
    model = _Net("")
    with torch.no_grad():
        model.last.weight[0, 0] = float("nan")
    assert _where(model, images) == "parameter 'last.weight'"
    assert "loss" in _where(_Net(""), images)


@pytest.mark.parametrize("kind", ["output", "gradient"])
def test_training_stops_at_the_step_and_keeps_the_checkpoint(
    tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from vision_ttt.layers import TTTLinear

    original, calls = TTTLinear.forward, []

    def forward(self: TTTLinear, *inputs: object, **more: object) -> Tensor:
        output = original(self, *inputs, **more)
        calls.append(self.training)
        # Six training passes: the second update of the second epoch.
        poisoned = self.training and calls.count(True) >= 6
        return _Poison.apply(output, kind == "output") if poisoned else output

    monkeypatch.setattr(TTTLinear, "forward", forward)
    config = TrainConfig(**tiny_fields())
    with pytest.raises(NonFiniteError, match=r"last\.safetensors") as caught:
        train(config)
    assert (caught.value.update, caught.value.epoch) == (5, 1)
    assert "blocks.0.mixer.ttt" in caught.value.where
    model, metadata = load_model(Path(config.output) / "last.safetensors")
    assert metadata.update == 4
    assert all(torch.isfinite(weight).all() for weight in model.parameters())
    monkeypatch.undo()
    assert len(train(config, resume=True).metrics["epochs"]) == 2


def test_nan_before_any_checkpoint(tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch) -> None:
    import vision_ttt.data.loading as loading

    def poisoned(items: list) -> dict:
        batch = original(items)
        batch["images"][0, 0, 0, 0] = float("nan")
        return batch

    original = loading.collate
    monkeypatch.setattr(loading, "collate", poisoned)
    config = TrainConfig(**tiny_fields())
    with pytest.raises(NonFiniteError, match=r"update 0 .*input images.*no checkpoint yet"):
        train(config)
    assert not (Path(config.output) / "last.safetensors").exists()


def test_full_disk_keeps_the_last_checkpoint(
    tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(**tiny_fields())
    original, writes = os.fsync, []

    def full(descriptor: int) -> None:
        writes.append(descriptor)
        # Two descriptions, four files of the first epoch, then the second epoch's state.
        if len(writes) > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left.*former content is kept.*last\.state\.pt"):
        train(config)
    monkeypatch.undo()
    run = Path(config.output)
    assert load_model(run / "last.safetensors")[1].update == 4
    assert not [path for path in run.rglob("*") if path.name.endswith(".part")]
    assert len(train(config, resume=True).metrics["epochs"]) == 2


def test_second_interrupt_is_immediate() -> None:
    import signal

    former = signal.getsignal(signal.SIGINT)
    with stop_on_interrupt() as request:
        signal.raise_signal(signal.SIGINT)
        assert request.made
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is former


def test_full_disk_under_tensorboard_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    figures = dict.fromkeys(("loss", "learning_rate", "gradient_norm", "images_per_second"), 1.0)
    with RunLog(tmp_path, first_update=0, show_progress=False) as log:
        monkeypatch.setattr(log.events, "add_scalar", full)
        with pytest.raises(OSError, match=r"No space left.*tensorboard"):
            log.update(epoch=0, epochs=1, update=1, updates=1, **figures)
