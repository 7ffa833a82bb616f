"""Tokenizers and models of others: their code is not run, and damaged files are told in a line."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vision_ttt.cli.main import main
from vision_ttt.engine.checkpoint import ModelMetadata, save_weights
from vision_ttt.engine.config import ConfigError
from vision_ttt.errors import DamagedModel, UserError
from vision_ttt.tasks.language.generation import generate
from vision_ttt.tasks.language.models import build_language_model
from vision_ttt.tasks.language.tokenizers import ByteTokenizer, FolderTokenizer

Said = pytest.CaptureFixture[str]
LLAMA = {
    "vocab_size": 4,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
VOCABULARY = {"<end>": 0, "a": 1, "b": 2, "<unk>": 3}


def _files(
    change: Callable[[dict[str, Any], dict[str, Any]], object] = lambda *_: None,
) -> dict[str, str]:
    """The files of a tokenizer of four words, changed."""
    end = {"id": 0, "content": "<end>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
        "added_tokens": [{**end, **flags}],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": dict(VOCABULARY), "unk_token": "<unk>"},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    change(tokenizer, config)
    return {"tokenizer.json": json.dumps(tokenizer), "tokenizer_config.json": json.dumps(config)}


def _write(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def _checkpoint(path: Path, files: dict[str, str]) -> Path:
    carried = {"tokenizer": "x", "tokenizer_files": files, "vocab_size": 4, "context": 8}
    model = build_language_model("llama", LLAMA)
    metadata = ModelMetadata({"name": "language"}, "llama", LLAMA, carried, {"dataset": "stdlib"})
    save_weights(path, model.state_dict(), metadata)
    return path


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """A module that leaves a mark when it is run, and the mark; who is asked says yes."""
    mark = tmp_path / "ran"
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 99))
    lines = [
        f"open({str(mark)!r}, 'w').close()",
        "from transformers import PreTrainedConfig, PreTrainedTokenizerFast",
        "class Tokens(PreTrainedTokenizerFast): pass",
        "class Config(PreTrainedConfig): model_type = 'own'",
    ]
    return "\n".join(lines), mark


def _mapped(_tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    config["auto_map"] = {"AutoTokenizer": [None, "own.Tokens"]}


def _mapped_without_class(tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    _mapped(tokenizer, config)
    del config["tokenizer_class"]


def test_a_checkpoint_runs_no_code(code: tuple[str, Path], tmp_path: Path, capsys: Said) -> None:
    module, mark = code
    for number, files in enumerate((_files(_mapped), _files(_mapped_without_class))):
        path = _checkpoint(tmp_path / f"{number}.safetensors", {**files, "own.py": module})
        for command in (["generate", str(path), "--prompt", "a"], ["eval", str(path)]):
            assert main(command) == 2
            assert "the tokenizer's file 'own.py' cannot be stored in a" in capsys.readouterr().err
    assert not mark.exists()


@pytest.mark.parametrize(
    ("files", "is_refused"),
    [
        (_files(_mapped), False),  # of a class that transformers has; the other one is not needed
        (_files(_mapped_without_class), True),
        ({**_files(_mapped), "config.json": json.dumps({"model_type": "llama"})}, False),
        (
            {
                "tokenizer_config.json": json.dumps({"tokenizer_class": "AutoConfig"}),
                "config.json": json.dumps(
                    {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
                ),
            },
            True,
        ),
    ],
    ids=["known class", "unknown class", "known model", "another automatic class"],
)
def test_a_folder_runs_no_code(
    code: tuple[str, Path], tmp_path: Path, files: dict[str, str], is_refused: bool
) -> None:
    module, mark = code
    folder = str(_write(tmp_path / "folder", {**files, "own.py": module}))
    if is_refused:
        with pytest.raises(ConfigError, match=r"cannot be read: [\s\S]*custom code"):
            FolderTokenizer(folder)
    else:
        assert FolderTokenizer(folder).encode("a b").tolist() == [1, 2]
    assert not mark.exists()


def test_a_models_folder_runs_no_code(code: tuple[str, Path], tmp_path: Path, capsys: Said) -> None:
    module, mark = code
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    files = {"config.json": json.dumps(config), "own.py": module}
    folder = _write(tmp_path / "folder", files)
    assert main(["generate", str(folder), "--prompt", "a", "--tokenizer", "bytes"]) == 2
    assert "custom code" in capsys.readouterr().err
    assert not mark.exists()


def test_a_models_folder_of_another_kind_of_numbers(tmp_path: Path, capsys: Said) -> None:
    model = build_language_model("llama", {**LLAMA, "vocab_size": 257})
    model.save_pretrained(tmp_path / "folder")
    file = tmp_path / "folder" / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "model.norm.weight": weights["model.norm.weight"].long()}, file)
    assert main(["generate", str(file.parent), "--prompt", "a", "--tokenizer", "bytes"]) == 2
    assert "model.norm.weight torch.int64 for torch.float32" in capsys.readouterr().err


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": "[]", "tokenizer_config.json": "[]"},
        {**_files(), "tokenizer_config.json": "[]"},
        {**_files(), "tokenizer.json": "[]"},
        {**_files(), "tokenizer_config.json": '{"a":' * 5000 + "1" + "}" * 5000},
        _files(lambda tokenizer, _: tokenizer["model"]["vocab"].update(a=-1)),
        _files(lambda tokenizer, _: tokenizer["added_tokens"][0].update(id=-5)),
        _files(lambda _, config: config.update(tokenizer_class=[1])),
        _files(lambda _, config: config.update(tokenizer_class="pipeline")),
        _files(lambda _, config: config.update(added_tokens_decoder=[1])),
    ],
)
def test_damaged_files_of_a_tokenizer(tmp_path: Path, files: dict[str, str], capsys: Said) -> None:
    path = _checkpoint(tmp_path / "c.safetensors", files)
    assert main(["generate", str(path), "--prompt", "a"]) == 2
    told = capsys.readouterr().err
    assert "cannot be read" in told
    assert told.count("\n") == 1


def test_a_tokenizer_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "folder", _files())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert FolderTokenizer("~/folder").encode("a b").tolist() == [1, 2]


def test_ids_beyond_any_vocabulary_take_no_memory(tmp_path: Path) -> None:
    files = _files(lambda tokenizer, _: tokenizer["model"]["vocab"].update(a=2_000_000_000))
    with pytest.raises(ConfigError, match=r"is 2000000001; it must be from 1 to 16,777,216"):
        FolderTokenizer(str(_write(tmp_path / "folder", files)))


def test_a_tokenizer_that_cannot_read_a_text_says_so(tmp_path: Path) -> None:
    files = _files(lambda _, config: config.update(model_max_length="x"))
    tokenizer = FolderTokenizer(str(_write(tmp_path / "folder", files)))
    with pytest.raises(UserError, match="the tokenizer cannot read the text"):
        tokenizer.encode("a b")


def test_a_tokenizer_of_files_that_a_checkpoint_cannot_carry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = FolderTokenizer(str(_write(tmp_path / "folder", _files())))

    def save(folder: str) -> tuple[str, ...]:
        (Path(folder) / "own.py").write_text("")
        return (f"{folder}/own.py",)

    monkeypatch.setattr(tokenizer._tokenizer, "save_pretrained", save)
    with pytest.raises(ConfigError, match=r"'own\.py' cannot be stored in a checkpoint"):
        tokenizer.files()


def test_infinite_logits_generate_nothing() -> None:
    model = build_language_model("llama", {**LLAMA, "vocab_size": 257}).eval()

    def infinite(_module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        output.logits[..., 0] = torch.inf
        return output

    model.register_forward_hook(infinite)
    with pytest.raises(DamagedModel, match="predicts NaN or infinity"):
        generate(model, ByteTokenizer(), "a", max_new_tokens=2)
