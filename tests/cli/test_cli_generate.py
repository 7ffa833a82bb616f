"""`vision-ttt generate`."""

import logging
import sys
from pathlib import Path
from typing import TextIO

import pytest
import torch
import transformers

from vision_ttt.cli.main import main
from vision_ttt.engine.checkpoint import ModelMetadata, save_weights
from vision_ttt.tasks.language.generation import generate
from vision_ttt.tasks.language.models import build_language_model
from vision_ttt.tasks.language.tokenizers import ByteTokenizer

Said = pytest.CaptureFixture[str]
ARGUMENTS = {
    "vocab_size": 257,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return build_language_model("llama", ARGUMENTS)


def _checkpoint(path: Path, model: torch.nn.Module, task: str = "language") -> str:
    carried = {"tokenizer": "bytes", "vocab_size": 257, "context": 32}
    save_weights(
        path, model.state_dict(), ModelMetadata({"name": task}, "llama", ARGUMENTS, carried)
    )
    return str(path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return _checkpoint(tmp_path / "last.safetensors", _model())


def _generated(capsys: Said, *command: str) -> str:
    assert main(["generate", *command, "--max-new-tokens", "20"]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_reader_that_has_gone_ends_the_text(
    checkpoint: str, unread: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", unread)
    with pytest.raises(SystemExit) as ended:
        main(["generate", checkpoint, "--prompt", "a"])
    assert ended.value.code == 141


def test_the_most_probable_tokens_follow_the_prompt(checkpoint: str, capsys: Said) -> None:
    said = _generated(capsys, checkpoint, "--prompt", "né ", "--temperature", "0")
    tokens = [256, *"né ".encode()]
    model = _model().eval()
    with torch.no_grad():
        for _ in range(20):
            tokens.append(model(torch.tensor([tokens])).logits[0, -1].argmax().item())
    written = tokens[1 : tokens.index(256, 1)] if 256 in tokens[1:] else tokens[1:]
    assert said == bytes(written).decode(errors="replace") + "\n"


def test_a_ttt_model_has_no_longest_text() -> None:
    torch.manual_seed(0)
    sizes = {**ARGUMENTS, "max_position_embeddings": 8, "mini_batch_size": 4}
    model = build_language_model("ttt", sizes).eval()
    logger = transformers.utils.logging.get_logger("transformers.generation.stopping_criteria")
    logger.warning_once.cache_clear()
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append
    logger.addHandler(handler)
    generate(model, ByteTokenizer(), "abc", max_new_tokens=12, temperature=0)
    logger.removeHandler(handler)
    assert not said
    assert not logger.disabled


def test_the_seed_decides_what_is_drawn(checkpoint: str, capsys: Said) -> None:
    command = (checkpoint, "--prompt", "x", "--temperature", "1.5", "--top-k", "0")
    first = _generated(capsys, *command)
    assert _generated(capsys, *command, "--seed", "0") == first
    assert _generated(capsys, *command, "--seed", "1") != first
    assert first.startswith("x")
    greedy = _generated(capsys, checkpoint, "--prompt", "x", "--temperature", "0")
    assert _generated(capsys, checkpoint, "--prompt", "x", "--top-k", "1") == greedy


def test_a_folder_of_transformers(checkpoint: str, tmp_path: Path, capsys: Said) -> None:
    folder = tmp_path / "saved"
    _model().save_pretrained(folder)
    assert main(["generate", str(folder)]) == 2
    assert "holds no tokenizer; name one by --tokenizer, such as bytes" in capsys.readouterr().err
    command = ("--prompt", "def ", "--seed", "3")
    capsys.readouterr()
    said = _generated(capsys, str(folder), *command, "--tokenizer", "bytes")
    assert said == _generated(capsys, checkpoint, *command)
    (folder / "model.safetensors").rename(folder / "away")
    torch.save(_model().state_dict(), folder / "pytorch_model.bin")  # a pickle
    assert main(["generate", str(folder), "--tokenizer", "bytes"]) == 2
    assert "is no causal language model that transformers can read" in capsys.readouterr().err


def test_weights_that_do_not_fit_are_no_model(tmp_path: Path, capsys: Said) -> None:
    folder = tmp_path / "saved"
    _model().save_pretrained(folder)
    weights = _model().state_dict()
    del weights["model.norm.weight"]
    _model().save_pretrained(folder, state_dict=weights)
    assert main(["generate", str(folder), "--tokenizer", "bytes"]) == 2
    said = capsys.readouterr().err
    assert "do not fit its model: missing keys model.norm.weight" in said


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["absent.safetensors"], "No such file: absent.safetensors"),
        (["."], "the folder . holds no config.json"),
        (["text"], "text is truncated, corrupt"),
        (["last.safetensors", "--top-k", "-1"], "--top-k is -1; it must be at least 0"),
        (["last.safetensors", "--max-new-tokens", "0"], "--max-new-tokens is 0; it must be"),
        (["last.safetensors", "--temperature", "-1"], "--temperature is -1.0; it must be at"),
        (["last.safetensors", "--tokenizer", "byte"], "tokenizer is 'byte'; it must be 'bytes'"),
        (["last.safetensors", "--device", "tpu9"], "device 'tpu9' cannot be used"),
        (["nan.safetensors"], "the model predicts NaN or infinity: its weights are damaged"),
        (["nan.safetensors", "--temperature", "0"], "the model predicts NaN"),
    ],
)
def test_what_cannot_be_done_is_said(
    checkpoint: str,
    tmp_path: Path,
    capsys: Said,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    message: str,
) -> None:
    model = _model()
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    _checkpoint(tmp_path / "nan.safetensors", model)
    (tmp_path / "text").write_text("no checkpoint")
    monkeypatch.chdir(tmp_path)
    assert main(["generate", *command]) == 2
    assert message in capsys.readouterr().err


def test_a_model_of_another_task_writes_nothing(tmp_path: Path, capsys: Said) -> None:
    other = _checkpoint(tmp_path / "other.safetensors", _model(), task="classification")
    assert main(["generate", other]) == 2
    assert "holds a classifier" in capsys.readouterr().err
