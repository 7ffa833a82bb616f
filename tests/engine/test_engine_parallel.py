"""Several processes train the model that one trains, and evaluate each image once."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import IterableDataset

import forked_python
from vision_ttt.engine import ConfigError, train
from vision_ttt.engine.loaders import evaluation_loader
from vision_ttt.engine.parallel import check_processes, make_accelerator
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.engine.state import read_state
from vision_ttt.recipes import resolve
from vision_ttt.tasks import load_model

Fields = Callable[..., dict]
TWENTY_UPDATES = {
    "epochs": 5,
    "batch_size": 4,
    "accumulation_steps": 2,
    "drop_path": 0.0,  # the processes draw their own
    "ema_decay": 0.9,
    "learning_rate": 5e-4,
}


def _in_two(command: list[str], tmp_path: Path) -> subprocess.CompletedProcess:
    """Run a command in two processes, which are told what torchrun would tell them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    out, err = tmp_path / "stdout", tmp_path / "stderr"
    with open(out, "w") as stdout, open(err, "w") as stderr:
        processes = [
            forked_python.start(
                ["-m", "vision_ttt", *command],
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]
        try:
            code = max(process.wait(170) for process in processes)
        finally:
            for process in processes:
                process.kill()
    return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())


def _under_torchrun(command: list[str], tmp_path: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"),
            *("--standalone", "-m", "vision_ttt", *command),
        ],
        capture_output=True,
        text=True,
        timeout=170,
        cwd=tmp_path,
    )


@pytest.mark.parametrize(
    ("sharding", "run"),
    [
        ("replicated", _in_two),
        pytest.param("replicated", _under_torchrun, marks=pytest.mark.slow),
        pytest.param("sharded", _under_torchrun, marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_what_one_does(
    tiny_fields: Fields, image_folder: Path, tmp_path: Path, sharding: str, run: Callable
) -> None:
    (image_folder / "val" / "dark" / "0.png").unlink()  # seven test images for two processes
    (image_folder / "train" / "dark" / "3.png").write_bytes(b"no image")
    fields = tiny_fields(**TWENTY_UPDATES, skip_bad=True, output=str(tmp_path / "one"))
    one = train(resolve(fields))
    recipe = tmp_path / "recipe.yaml"
    config = resolve({**fields, "output": str(tmp_path / "two")})
    recipe.write_text(json.dumps(config.as_dict()))
    process = run(["train", str(recipe), "--sharding", sharding], tmp_path)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("best test accuracy") == 1  # one process speaks
    first, second = (read_state(checkpoints(tmp_path / run)[0]) for run in ("one", "two"))
    assert second.state.update == 20
    for part in ("model", "average"):
        tensors, others = getattr(first, part), getattr(second, part)
        difference = max((others[name] - weight).abs().max() for name, weight in tensors.items())
        assert difference <= 1e-6, part
    assert first.moments.keys() == second.moments.keys()
    metrics = json.loads((tmp_path / "two" / "metrics.json").read_text())
    assert metrics["damaged_items"] == one.metrics["damaged_items"]
    for row, other in zip(one.metrics["history"], metrics["history"], strict=True):
        for name in ("train_loss", "test_loss", "test_accuracy"):
            assert other[name] == pytest.approx(row[name], abs=1e-6)
    confusion = one.evaluation.confusion
    assert confusion.sum() == 7
    # What was trained by two is gone on with by one.
    resumed = train(config, resume=True)
    assert torch.equal(resumed.evaluation.confusion, confusion)
    model, _ = load_model(tmp_path / "two" / "last.safetensors")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, second.average[name])


@pytest.mark.slow
def test_two_processes_evaluate_each_image_once(
    tiny_fields: Fields, image_folder: Path, tmp_path: Path
) -> None:
    (image_folder / "val" / "light" / "1.png").unlink()
    config = resolve(tiny_fields(epochs=1))
    evaluation = train(config).evaluation
    weights = str(Path(config.run.output) / "last.safetensors")
    process = _under_torchrun(["eval", weights, "--json", "--batch_size", "2"], tmp_path)
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["images"] == 7
    assert report["accuracy"] == evaluation.accuracy
    assert report["loss"] == pytest.approx(evaluation.loss, abs=1e-6)


def test_precision_and_accumulation_are_the_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert make_accelerator().mixed_precision == "no"
    assert make_accelerator(2).gradient_accumulation_steps == 2


def test_what_cannot_be_divided() -> None:
    accelerator = make_accelerator()
    with pytest.raises(ConfigError, match="torchrun"):
        check_processes(resolve({"task": "classification", "sharding": "sharded"}), accelerator)

    class Four:
        num_processes = 4

    with pytest.raises(ConfigError, match="multiple of the 4 processes"):
        check_processes(resolve({"task": "classification", "batch_size": 66}), Four())
    with pytest.raises(ConfigError, match="even share"):
        check_processes(
            resolve(
                {"task": "classification", "batch_size": 24, "accumulation_steps": 2, "mixup": 0.8}
            ),
            Four(),
        )
    check_processes(resolve({"task": "classification", "batch_size": 24, "mixup": 0.8}), Four())


class _Stream(IterableDataset):
    """A dataset that is read in order only."""

    def __iter__(self) -> Iterator[int]:
        yield 0


def test_several_processes_evaluate_no_stream() -> None:
    one, two = (SimpleNamespace(process_index=0, num_processes=count) for count in (1, 2))
    assert list(evaluation_loader(_Stream(), 1, list, one)) == [[0]]
    with pytest.raises(ConfigError, match="several processes cannot divide a stream"):
        evaluation_loader(_Stream(), 1, list, two)
