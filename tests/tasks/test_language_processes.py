"""Two processes train the language model that one trains, and count each token once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vision_ttt.engine import train
from vision_ttt.recipes import resolve
from vision_ttt.tasks import load_model

pytestmark = pytest.mark.slow


def _in_two(command: list[str], folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"),
            *("--standalone", "-m", "vision_ttt", *command),
        ],
        capture_output=True,
        text=True,
        timeout=170,
        cwd=folder,
    )


@pytest.mark.parametrize("sharding", ["replicated", "sharded"])
def test_two_processes_train_what_one_does(tmp_path: Path, sharding: str) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    for number in range(8):
        text = f"document {number} has its own words; " * (3 + 2 * number)
        (folder / f"{number}.txt").write_text(text)
    (folder / "8.txt").write_bytes(b"\xff")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    fields = {
        "task": "language",
        "dataset": str(folder),
        "context": 64,
        "test_share": 0.4,
        "skip_bad": True,
        "model": "llama",
        "arguments": {**sizes, "num_attention_heads": 2, "tie_word_embeddings": True},
        "epochs": 4,
        "batch_size": 4,
        "accumulation_steps": 2,
        "learning_rate": 5e-4,
        "ema_decay": 0.9,
        "output": str(tmp_path / "one"),
    }
    one = train(resolve(fields))
    assert len(one.task.test_set) % 2  # one process has a sequence that the other has, too
    recipe = tmp_path / "recipe.yaml"
    config = resolve({**fields, "sharding": sharding, "output": str(tmp_path / "two")})
    recipe.write_text(json.dumps(config.as_dict()))
    process = _in_two(["train", str(recipe)], tmp_path)
    assert process.returncode == 0, process.stderr
    metrics = json.loads((tmp_path / "two" / "metrics.json").read_text())
    assert metrics["damaged_items"] == one.metrics["damaged_items"]
    assert len(metrics["damaged_items"]) == 1
    for row, other in zip(one.metrics["history"], metrics["history"], strict=True):
        for name in ("train_loss", "test_loss", "test_accuracy"):
            assert other[name] == pytest.approx(row[name], abs=1e-5)
    weights = tmp_path / "two" / "last.safetensors"
    model, _ = load_model(weights, task="language")
    for name, weight in one.model.state_dict().items():
        assert (model.state_dict()[name] - weight).abs().max() <= 1e-5
    process = _in_two(["eval", str(weights), "--json", "--batch-size", "2", "--skip-bad"], tmp_path)
    assert process.returncode == 0, process.stderr
    told = json.loads(process.stdout)
    assert told["tokens"] == one.metrics["test_tokens"]
    assert told["loss"] == pytest.approx(one.evaluation.loss, abs=1e-5)
    assert torch.equal(one.evaluation.counts.sum(), torch.tensor(told["tokens"]))
