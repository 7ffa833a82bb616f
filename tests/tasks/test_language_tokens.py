"""Folders of tokens: rows of several formats, made once, trained on as the text itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from interrupted_runs import train_until
from vision_ttt.cli.main import main
from vision_ttt.data import documents as documents_module
from vision_ttt.data.documents import DocumentError, find_documents
from vision_ttt.engine import TrainConfig, train
from vision_ttt.recipes import resolve
from vision_ttt.tasks.language.packing import pack
from vision_ttt.tasks.language.token_folder import write_token_folder
from vision_ttt.tasks.language.tokenizers import ByteTokenizer

Said = pytest.CaptureFixture[str]
TEXTS = [f"document {number} of état and art\n" * (2 + number) for number in range(12)]
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The texts as files, whose order is that of the texts."""
    root = tmp_path / "text"
    root.mkdir()
    for number, text in enumerate(TEXTS):
        (root / f"{number:02}.txt").write_text(text)
    return root


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., TrainConfig]:
    """Makes the config of a small run, overridden at will."""

    def make(**changes: Any) -> TrainConfig:
        fields = {"task": "language", "context": 16, "model": "llama", "updates": 7}
        model = {"arguments": {**SIZES, "num_attention_heads": 2}}
        output = {"output": str(tmp_path / "run")}
        return resolve({**fields, **model, "batch_size": 4, **output, **changes})

    return make


def _rows(path: Path) -> None:
    rows = [{"content": text, "id": number} for number, text in enumerate(TEXTS)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".jsonl":
        path.write_bytes(lines)
    elif path.suffix == ".zst":  # two frames
        zstandard = pytest.importorskip("zstandard")
        half = lines.index(b"\n", len(lines) // 2) - 9
        parts = (lines[:half], lines[half:])
        path.write_bytes(b"".join(map(zstandard.ZstdCompressor().compress, parts)))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("datasets")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.parquet"])
def test_rows_are_documents(name: str, folder: Path, tmp_path: Path, capsys: Said) -> None:
    rows, output = tmp_path / "rows", tmp_path / "tokens"
    rows.mkdir()
    _rows(rows / name)
    command = ["tokenize", str(rows), str(output), "--pattern", "*"]
    assert main(command) == 2
    assert f"{name}, row 1: no text in 'text'" in capsys.readouterr().err
    assert main([*command, "--field", "content"]) == 0
    assert "tokens of 12 documents" in capsys.readouterr().out
    tokens = np.fromfile(output / "tokens.bin", dtype=np.uint16)
    expected = pack(find_documents(str(folder), "*"), ByteTokenizer())
    assert tokens.tolist() == expected.tokens.tolist()
    told = json.loads((output / "tokens.json").read_text())
    assert (told["tokens"], told["bytes"]) == (len(tokens), expected.bytes)
    assert main(command) == 2
    assert "is not empty; name another folder, or give --overwrite" in capsys.readouterr().err


def test_a_row_with_half_a_character_is_damaged(tmp_path: Path, capsys: Said) -> None:
    source, output = tmp_path / "rows", tmp_path / "tokens"
    source.mkdir()
    (source / "a.jsonl").write_text('{"text": "one"}\n{"text": "cut \\ud83d"}\n')
    command = ["tokenize", str(source), str(output), "--pattern", "*"]
    assert main(command) == 2
    assert "a.jsonl, row 2: no UTF-8 text at character 4" in capsys.readouterr().err
    assert main([*command, "--skip-bad"]) == 0
    assert "tokens of 1 documents, 3 bytes" in capsys.readouterr().out


def test_a_long_file_is_read_in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_documents(str(folder), "*")
    whole = pack(found, ByteTokenizer())
    monkeypatch.setattr(documents_module, "_PIECE", 35)  # cuts characters, too
    assert len(list(found.pieces("11.txt"))) > 10
    cut = pack(found, ByteTokenizer())
    assert cut.tokens.tolist() == whole.tokens.tolist()
    assert (cut.documents, cut.bytes) == (whole.documents, whole.bytes)
    (folder / "00.txt").write_bytes(b"a" * 69 + "é".encode()[:1])
    assert "byte 69 " in str(pack(found, ByteTokenizer()).damaged[0])


def test_tokens_are_trained_on_as_the_text_and_resume_within_an_epoch(
    folder: Path, tmp_path: Path, make_config: Callable[..., TrainConfig]
) -> None:
    validation = tmp_path / "validation"
    validation.mkdir()
    (validation / "0.txt").write_text("other words\n")
    for source in (folder, validation):
        assert main(["tokenize", str(source), str(tmp_path / "tokens" / source.name)]) == 0
    places = {"dataset": str(folder), "validation": str(validation)}
    whole = train(make_config(**places, output=str(tmp_path / "whole")))
    assert whole.metrics["test_bytes"] == len("other words\n")
    tokens = {name: str(tmp_path / "tokens" / Path(path).name) for name, path in places.items()}
    config = make_config(**tokens, checkpoint_every=1)
    train_until(config, 4)
    resumed = train(config, resume=True)
    assert resumed.metrics["history"][-1]["epoch"] < 1
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
    assert resumed.evaluation.metrics == whole.evaluation.metrics
    weights = str(resumed.run_dir / "last.safetensors")
    assert main(["eval", weights]) == 0
    assert main(["eval", weights, "--dataset", tokens["dataset"], "--split", "all"]) == 0


def test_tokens_are_refused_by_what_is_wrong(
    folder: Path, tmp_path: Path, make_config: Callable[..., TrainConfig]
) -> None:
    tokens = tmp_path / "tokens"
    assert main(["tokenize", str(folder), str(tokens)]) == 0
    with pytest.raises(ValueError, match="of which none are held out: give another folder"):
        train(make_config(dataset=str(tokens)))
    config = make_config(dataset=str(tokens), validation=str(tokens))
    told = json.loads((tokens / "tokens.json").read_text())
    (tokens / "tokens.json").write_text(json.dumps({**told, "tokenizer": "another"}))
    with pytest.raises(ValueError, match=r"of another tokenizer, with 257 tokens; that of the"):
        train(config)
    (tokens / "tokens.json").write_text(json.dumps({**told, "tokens": told["tokens"] + 1}))
    with pytest.raises(ValueError, match=r"are damaged: tokens\.bin has [\d,]+ bytes instead of"):
        train(config)


def test_former_tokens_stay_whole_where_a_document_cannot_be_read(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "tokens"
    source.mkdir()
    (source / "b.txt").write_text("words of a text")
    done: list[int] = []

    def between(files: int, _tokens: int) -> None:
        done.append(files)

    def write() -> None:
        documents = find_documents(str(source), "*.txt")
        write_token_folder(
            folder, documents, ByteTokenizer(), "text", skip_bad=False, between=between
        )

    write()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (source / "a.txt").write_bytes(b"\xff\xfe\xff")
    done.clear()
    with pytest.raises(DocumentError, match=r"a\.txt"):
        write()
    assert not done  # the first file ends it
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
