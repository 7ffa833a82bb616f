"""Checkpoints load into the very model, or are refused by name; nothing is ever unpickled."""

import dataclasses
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from described_models import describe_classifier
from vision_ttt.engine import CheckpointError, ConfigError
from vision_ttt.engine.building import build_model, load_weights
from vision_ttt.engine.checkpoint import ModelMetadata, save_weights
from vision_ttt.engine.state import (
    SavedRun,
    TrainState,
    check_fits,
    open_state,
    optimizer_moments,
    read_state,
    restore_moments,
    save_state,
)
from vision_ttt.engine.tensor_files import inspect_tensors, read_tensors, write_tensors
from vision_ttt.tasks import load_model
from vision_ttt.tasks.images.models import data_config, model_arguments

MODEL = "vittt_nano_patch4_32"
ARGUMENTS = {"depth": 1, "embed_dim": 32, "num_heads": 1}


def _model(**more: object) -> tuple[nn.Module, ModelMetadata]:
    arguments = model_arguments(MODEL, num_classes=3, image_size=16, extra={**ARGUMENTS, **more})
    model = build_model(MODEL, arguments)
    classes = ("a", "b", "ç")
    return model, describe_classifier(MODEL, arguments, classes, data_config(model, 16))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "last.safetensors"
    model, metadata = _model()
    save_weights(path, model.state_dict(), metadata)
    return path


def test_round_trip(tmp_path: Path) -> None:
    model, metadata = _model()
    save_weights(tmp_path / "w.safetensors", model.state_dict(), metadata)
    loaded, read = load_model(tmp_path / "w.safetensors")
    assert read.carried["classes"] == metadata.carried["classes"]
    assert tuple(read.carried["input"]["input_size"]) == (3, 16, 16)
    images = torch.randn(2, 3, 16, 16)
    assert not loaded.training
    assert torch.equal(loaded(images), model.eval()(images))


def test_missing_file() -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors"):
        load_model("none.safetensors")


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_truncated_file_is_named(checkpoint: Path, size: int) -> None:
    checkpoint.write_bytes(checkpoint.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"last\.safetensors is truncated"):
        load_model(checkpoint)


class _Trap:
    """Unpickling it would make a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.mkdir, (str(self.folder),)


def _pickle(content: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))  # torch.load warns of later ones


@pytest.mark.parametrize("write", [torch.save, _pickle])
@pytest.mark.parametrize("read", [load_model, read_tensors, read_state])
def test_pickle_is_never_unpickled(tmp_path: Path, write: Callable, read: Callable) -> None:
    path = tmp_path / "evil.safetensors"
    write({"format": 1, "state": _Trap(tmp_path / "sprung")}, path)
    with pytest.raises(CheckpointError, match=r"evil.*pickle"):
        read(path)
    assert not (tmp_path / "sprung").exists()


def _rewrite(path: Path, change: Callable[[dict], object]) -> None:
    weights, text = read_tensors(path)
    values = json.loads(text)
    change(values)
    safetensors.torch.save_file(weights, path, {"vision_ttt": json.dumps(values)})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m["model_args"].update(depth=2), r"missing blocks\.1\.\S+.* more"),
        (lambda m: m["model_args"].update(embed_dim=64), r"of another shape \S+ \[.*\] for \["),
        (
            lambda m: m.update(model="resnet18", model_args={"num_classes": 3}),
            "unexpected blocks",
        ),
        (lambda m: m.update(model="hf-hub:some/model"), "unknown model"),
        (lambda m: m["model_args"].update(checkpoint_path="x.pth"), "checkpoint_path"),
        (lambda m: m["model_args"].update(pretrained_cfg_overlay={"file": "x"}), "pretrained_cfg"),
        (lambda m: m["model_args"].update(nonsense=1), "nonsense"),
        (lambda m: m["carried"].pop("classes"), "damaged"),
        (lambda m: m["carried"].update(classes=["a"]), "damaged"),
        (lambda m: m.update(format=99), "format 99"),
    ],
)
def test_metadata_of_another_model_is_refused(
    checkpoint: Path, change: Callable[[dict], object], told: str
) -> None:
    _rewrite(checkpoint, change)
    with pytest.raises(CheckpointError, match=told) as caught:
        load_model(checkpoint)
    assert "last.safetensors" in str(caught.value)


def test_weights_without_our_metadata(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="no vision-ttt metadata"):
        load_model(tmp_path / "other.safetensors")


@pytest.mark.parametrize("start", [b"\x80\x02", b"\x80\x05", b"PK"])
def test_a_header_whose_length_looks_like_a_pickle(start: bytes, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    length = int.from_bytes(start, "little")
    write_tensors(path, {"weight": torch.ones(2)}, "x")
    own = int.from_bytes(path.read_bytes()[:8], "little")
    write_tensors(path, {"weight": torch.ones(2)}, "x" * (1 + length - own))
    assert path.read_bytes().startswith(start)
    tensors, _ = read_tensors(path)
    assert torch.equal(tensors["weight"], torch.ones(2))


def test_fine_tuning_leaves_out_a_head_of_another_size_and_nothing_else() -> None:
    source, _ = _model()
    target = build_model(MODEL, {**ARGUMENTS, "num_classes": 5, "img_size": 16})
    head = target.head.weight.clone()
    load_weights(target, source.state_dict(), "source", skip=("head",))
    assert torch.equal(target.head.weight, head)
    for name, weight in source.state_dict().items():
        assert name.startswith("head.") or torch.equal(target.state_dict()[name], weight)
    deeper = build_model(MODEL, {**ARGUMENTS, "depth": 2, "num_classes": 5, "img_size": 16})
    with pytest.raises(ConfigError, match="missing blocks"):
        load_weights(deeper, source.state_dict(), "source", skip=("head",))


def test_state_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    model, _ = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    optimizer.step()
    state = TrainState(config={"seed": 0}, epoch=2, history=[{"epoch": 1, "inner_losses": {}}])
    moments = optimizer_moments(model, optimizer)
    save_state(path, SavedRun(state, model.state_dict(), {}, moments))
    read = read_state(path)
    assert dataclasses.asdict(read.state) == dataclasses.asdict(state)
    assert all(torch.equal(read.model[k], v) for k, v in model.state_dict().items())
    # Whatever the order of the parameters in the optimiser's groups.
    other, _ = _model()
    fresh = torch.optim.AdamW(list(other.parameters())[::-1])
    restore_moments(other, fresh, read.moments)
    names = dict(other.named_parameters())
    for name, weight in model.named_parameters():
        for key, value in optimizer.state[weight].items():
            assert torch.equal(fresh.state[names[name]][key], value)
    with pytest.raises(FileNotFoundError, match="none"):
        read_state(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("part", "dtype"), [("model", torch.int64), ("model", torch.bool), ("moments", torch.int64)]
)
def test_a_state_of_another_kind_of_numbers_is_refused(
    tmp_path: Path, part: str, dtype: torch.dtype
) -> None:
    path = tmp_path / "state.safetensors"
    model, _ = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    optimizer.step()
    parts = {"model": model.state_dict(), "moments": optimizer_moments(model, optimizer)}
    save_state(path, SavedRun(TrainState(), average={}, **parts))
    check_fits(open_state(path), model, averaged=False)
    name = next(iter(parts[part]))
    parts[part] = {**parts[part], name: parts[part][name].to(dtype)}
    save_state(path, SavedRun(TrainState(), average={}, **parts))
    with pytest.raises(ValueError, match=rf"{part}/{name} has dtype {dtype}; expected"):
        check_fits(open_state(path), model, averaged=False)


@pytest.mark.parametrize(
    "change", [{"config": [1]}, {"history": [1]}, {"history": {}}, {"epoch": -1}], ids=str
)
def test_a_state_of_other_types_is_damaged(tmp_path: Path, change: dict) -> None:
    path = tmp_path / "state.safetensors"
    state = {**dataclasses.asdict(TrainState()), **change}
    write_tensors(path, {"model/a": torch.zeros(1)}, json.dumps({"format": 3, "state": state}))
    with pytest.raises(CheckpointError, match="is not the state of a run"):
        open_state(path)


def test_no_byte_changes_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    text = json.dumps({"quotes": '"sha256":"', "unicode": "ç"})
    write_tensors(path, {"a": torch.arange(5.0), "b": torch.tensor(1)}, text)
    whole = path.read_bytes()
    assert read_tensors(path)[1] == text
    for place in range(len(whole)):
        if b"sha256" in whole[max(place - 6, 0) : place + 7]:
            continue  # without its key a digest is not known to be there, as in others' files
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        for read in (read_tensors, inspect_tensors):
            with pytest.raises(CheckpointError, match=r"small\.safetensors"):
                read(path)
    for size in (0, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"small\.safetensors"):
            read_tensors(path)


def test_a_state_that_is_none(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"last\.safetensors"):
        read_state(checkpoint)
    others = tmp_path / "others.safetensors"
    safetensors.torch.save_file({"model/a": torch.zeros(1)}, others)
    with pytest.raises(CheckpointError, match="has no SHA-256"):
        read_state(others)


def test_unknown_model_and_reserved_arguments() -> None:
    with pytest.raises(ConfigError, match=r"nearest: vittt_nano_patch4_32"):
        build_model("vittt_nano_patch4_23", {})
    with pytest.raises(ConfigError, match="nonsense"):
        build_model(MODEL, {"nonsense": 1})
    with pytest.raises(ConfigError, match=r"set data\.image_size"):
        model_arguments(MODEL, num_classes=3, extra={"img_size": 64})
