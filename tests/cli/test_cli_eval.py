"""`vision-ttt eval` of models that compute NaN or infinity: no figures, and where it begins."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from described_models import describe_classifier
from vision_ttt.cli.main import main
from vision_ttt.engine.building import build_model
from vision_ttt.engine.checkpoint import ModelMetadata, save_weights
from vision_ttt.engine.non_finite_search import find_in_forward, watched_calls
from vision_ttt.tasks.images.models import data_config
from vision_ttt.tasks.language.models import build_language_model

Said = pytest.CaptureFixture[str]
NANO = {"num_classes": 2, "depth": 1, "embed_dim": 32, "num_heads": 1, "img_size": 16}
LLAMA = {
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def _classifier(path: Path, change: Callable[[dict[str, Tensor]], object]) -> list[str]:
    torch.manual_seed(0)
    model = build_model("vittt_nano_patch4_32", NANO)
    weights = model.state_dict()
    change(weights)
    described = data_config(model, 16)
    metadata = describe_classifier("vittt_nano_patch4_32", NANO, ("dark", "light"), described)
    save_weights(path, weights, metadata)
    return [str(path)]


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=str)
@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda weights: weights["head.weight"].fill_(torch.nan), "parameter 'head.weight'"),
        (lambda weights: weights["pos_embed"].fill_(torch.inf), "parameter 'pos_embed'"),
        (lambda weights: weights["blocks.0.norm.weight"].fill_(3e38), "the output of module"),
    ],
    ids=["NaN", "infinity", "overflow"],
)
def test_a_classifier(
    image_folder: Path,
    tmp_path: Path,
    capsys: Said,
    change: Callable[[dict[str, Tensor]], object],
    where: str,
    flags: list[str],
) -> None:
    command = ["eval", *_classifier(tmp_path / "c.safetensors", change), *flags]
    assert main([*command, "--dataset", str(image_folder)]) == 1
    said = capsys.readouterr()
    assert not said.out
    assert said.err.count("\n") == 1
    assert f"cannot be measured: loss is nan; NaN or infinity first appears in {where}" in said.err


def test_a_sound_classifier(image_folder: Path, tmp_path: Path, capsys: Said) -> None:
    command = ["eval", *_classifier(tmp_path / "c.safetensors", lambda weights: None)]
    assert main([*command, "--dataset", str(image_folder)]) == 0
    said = capsys.readouterr()
    assert "│ loss" in said.out
    assert "cannot be measured" not in said.err
    assert "part for test" not in said.err
    undivided = ["--dataset", str(image_folder / "train")]
    assert main([*command, *undivided]) == 0
    assert "has no part for test: 4 of its 16 images are evaluated" in capsys.readouterr().err
    assert main([*command, *undivided, "--split", "all"]) == 0
    assert "part for test" not in capsys.readouterr().err


def test_a_language_model(tmp_path: Path, capsys: Said) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("some words")
    model = build_language_model("llama", LLAMA)
    weights = model.state_dict()
    weights["model.norm.weight"].fill_(torch.nan)
    carried = {"tokenizer": "bytes", "vocab_size": 257, "context": 8}
    data = {"dataset": str(tmp_path), "context": 8}
    metadata = ModelMetadata({"name": "language"}, "llama", LLAMA, carried, data)
    save_weights(tmp_path / "c.safetensors", weights, metadata)
    assert main(["eval", str(tmp_path / "c.safetensors"), "--split", "all"]) == 1
    told = capsys.readouterr().err
    assert "perplexity is nan" in told
    assert "parameter 'model.norm.weight'" in told


def test_the_call_that_went_wrong_is_kept_and_buffers_are_looked_at() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Identity()).eval()
    wrong = torch.tensor([[1.0, torch.inf]])
    with watched_calls(model) as calls:
        model(torch.zeros(1, 2))
        assert calls.are_finite
        model(wrong)
        model(torch.zeros(1, 2))
    assert not calls.are_finite
    assert calls.arguments[0] is wrong
    model(wrong)
    assert not model._forward_hooks
    assert find_in_forward(model, lambda: model(torch.zeros(1, 2))) is None
    model[0].running_var.fill_(torch.nan)
    assert find_in_forward(model, lambda: None) == "buffer '0.running_var'"
