"""The task language: documents to tokens, training, evaluation by position, resume, report."""

import json
import math
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from interrupted_runs import train_until
from vision_ttt.cli.main import main
from vision_ttt.data import DatasetError
from vision_ttt.data.documents import DocumentError, Documents, find_documents
from vision_ttt.engine import ConfigError, TrainConfig, train
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.engine.optimisation import make_optimizer
from vision_ttt.errors import UserError
from vision_ttt.recipes import resolve
from vision_ttt.tasks import load_model
from vision_ttt.tasks.language.generation import generate
from vision_ttt.tasks.language.metadata import carried_tokenizer
from vision_ttt.tasks.language.models import build_language_model
from vision_ttt.tasks.language.next_tokens import next_token_logits, scans_as_one_op
from vision_ttt.tasks.language.packing import IGNORED, Sequences, pack
from vision_ttt.tasks.language.positions import band_edges, band_of_position, octaves
from vision_ttt.tasks.language.tokenizers import ByteTokenizer, FolderTokenizer, open_tokenizer

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}
Fields = Callable[..., TrainConfig]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten documents of a few words each, 60 to 500 bytes."""
    root = tmp_path / "documents"
    words = ("état", "of", "the", "art", "tokens", "learn", "tokens,", "at", "test", "time.\n")
    drawn = random.Random(0)
    for number in range(10):
        path = root / f"part {number % 2}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = " ".join(drawn.choice(words) for _ in range(10 + 8 * number))
        path.write_text(text, encoding="utf-8")
    return root


@pytest.fixture
def make_config(folder: Path, tmp_path: Path) -> Fields:
    """Makes the config of a small run on the folder, overridden at will."""

    def make(**changes: Any) -> TrainConfig:
        fields = {
            "task": "language",
            "dataset": str(folder),
            "context": 32,
            "test_share": 0.3,
            "model": "llama",
            "arguments": LLAMA,
            "updates": 12,
            "batch_size": 4,
            "learning_rate": 3e-3,
            "output": str(tmp_path / "run"),
        }
        return resolve({**fields, **changes})

    return make


def test_bytes_come_and_go_as_text() -> None:
    tokenizer = ByteTokenizer()
    text = "naïve – 名前\r\n"
    tokens = tokenizer.encode(text).tolist()
    assert bytes(tokens) == text.encode()
    assert tokenizer.decode([256, *tokens, 256]) == text
    text_of = tokenizer.stream()
    pieces = [text_of(token) for token in [*tokens, 0xE5, None]]
    assert "".join(pieces) == text + "\ufffd"
    assert pieces[:4] == ["n", "a", "", "ï"]


def test_eval_of_documents_that_have_grown(
    make_config: Fields, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    """Other documents would be held out for test now, and the model was trained on some of them."""
    result = train(make_config(updates=1))
    command = ["eval", str(result.run_dir / "last.safetensors"), "--json"]
    assert main(command) == 0
    for number in range(10):
        (folder / f"more {number}.txt").write_text("tokens learn at test time")
    capsys.readouterr()
    for spelled in ([], ["--dataset", f"{folder}/../{folder.name}"]):
        assert main([*command, *spelled]) == 2
        assert "other documents of" in capsys.readouterr().err
    assert main([*command, "--split", "all"]) == 0


def test_documents_are_held_out_by_their_names(folder: Path) -> None:
    documents = find_documents(str(folder), "**/*.txt")
    assert documents.names == tuple(sorted(f"part {n % 2}/{n}.txt" for n in range(10)))
    train_part, test_part = documents.held_out(0.3)
    assert len(test_part.names) == 3
    assert sorted(train_part.names + test_part.names) == list(documents.names)
    assert documents.held_out(0.3) == (train_part, test_part)
    assert find_documents(str(folder), "part 0/*.txt").names == documents.names[:5]
    for hidden in (folder / ".cache" / "0.txt", folder / "part 0" / "._0.txt"):
        hidden.parent.mkdir(exist_ok=True)
        hidden.write_text("a program's own")
    assert find_documents(str(folder), "**/*.txt").names == documents.names
    with pytest.raises(DatasetError, match="10 documents, of which 10 would be held out"):
        documents.held_out(0.99)
    with pytest.raises(DatasetError, match="holds no files of the pattern"):
        find_documents(str(folder), "*.rst")
    with pytest.raises(DatasetError, match="absent does not exist"):
        find_documents(str(folder / "absent"), "*")
    with pytest.raises(DatasetError, match="pattern '/x': "):
        find_documents(str(folder), "/x")


def _read(documents: Documents, name: str) -> str:
    return "".join(text for text, _ in documents.pieces(name))


def test_the_standard_library_is_chosen_as_stated() -> None:
    documents = find_documents("stdlib", "**/*.txt")
    names = set(documents.names)
    assert {"argparse.py", "json/decoder.py", "email/mime/text.py"} <= names
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "idlelib", "encodings"}
    assert not any("_sysconfigdata" in name for name in names)
    assert "def " in _read(documents, "argparse.py")


@pytest.mark.parametrize("context", [2, 7, 32, 5000])
def test_each_token_is_predicted_once_from_the_one_before(folder: Path, context: int) -> None:
    documents = find_documents(str(folder), "**/*.txt")
    texts = [_read(documents, name).encode() for name in documents.names]
    expected = [token for text in texts for token in (*text, 256)]
    packed = pack(documents, ByteTokenizer())
    assert packed.bytes == sum(map(len, texts))
    assert packed.documents == 10
    sequences = Sequences(packed, context, end=256)
    items = [sequences[index] for index in range(len(sequences))]
    assert all(len(inputs) == len(targets) == context for inputs, targets, _ in items)
    inputs, targets = (torch.cat(each) for each in list(zip(*items, strict=True))[:2])
    kept = targets != IGNORED
    assert targets[kept].tolist() == expected
    assert inputs[kept].tolist() == [256, *expected[:-1]]
    assert len(targets) - kept.sum() < context


def test_positions_lie_in_bands_and_octaves() -> None:
    edges = band_edges(100)
    assert edges == [16, 24, 32, 48, 64, 96, 100]
    assert [edges[group[-1]] for group in octaves(edges)] == [16, 32, 64, 100]
    bands = band_of_position(100)
    assert bands.bincount().tolist() == [16, 8, 8, 16, 16, 32, 4]
    assert band_edges(2) == [2]
    assert octaves([2]) == [[0]]
    assert [band_edges(512)[group[-1]] for group in octaves(band_edges(512))][-2:] == [256, 512]


def test_models_are_refused_by_what_is_wrong(make_config: Fields) -> None:
    with pytest.raises(ConfigError, match=r"unknown language model 'lama', .*; nearest: llama"):
        build_language_model("lama", {})
    with pytest.raises(ConfigError, match="no argument 'hiden_size'; nearest: hidden_size"):
        build_language_model("llama", {"hiden_size": 32})
    with pytest.raises(ConfigError, match="cannot be built with"):
        build_language_model("llama", {**LLAMA, "num_attention_heads": 5})
    with pytest.raises(ConfigError, match="may not hold vocab_size; the tokenizer gives it"):
        train(make_config(arguments={**LLAMA, "vocab_size": 9}))
    with pytest.raises(ConfigError, match=r"drop_path is 0\.1; language models have none"):
        make_config(drop_path=0.1)
    with pytest.raises(ConfigError, match=r"pattern is 'x'; it must be .*, as dataset is 'stdlib'"):
        make_config(dataset="stdlib", pattern="x")
    with pytest.raises(ConfigError, match="tokenizer is 'byte'; it must be 'bytes' or the folder"):
        train(make_config(tokenizer="byte"))


def test_it_learns_and_what_it_says_of_itself_is_so(make_config: Fields, folder: Path) -> None:
    result = train(make_config(updates=None, units=4 * 32 * 40 - 5, evaluate_every=10))
    rows = result.metrics["history"]
    assert [row["update"] for row in rows] == [10, 20, 30, 40]
    assert rows[-1]["test_loss"] < 0.8 * rows[0]["test_loss"] < 0.8 * math.log(257)
    assert rows[-1]["tokens_per_second"] > 0
    task, model = result.task, result.model
    documents = task.documents.held_out(0.3)[1]
    assert result.metrics["test_documents"] == 3
    size = sum(len(_read(documents, name).encode()) for name in documents.names)
    assert result.metrics["test_bytes"] == size
    assert result.metrics["test_tokens"] == size + 3
    # The same by hand, sequence by sequence.
    nats, hits, late = 0.0, 0, 0.0
    with torch.no_grad():
        for inputs, targets, _ in (task.test_set[i] for i in range(len(task.test_set))):
            logits = model(inputs[None]).logits[0]
            losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
            nats += losses.sum().item()
            late += losses[16:].sum().item()
            hits += (logits.argmax(-1) == targets).sum().item()
    metrics = result.evaluation.metrics
    assert metrics["loss"] == pytest.approx(nats / (size + 3), rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(nats / (size + 3)), rel=1e-5)
    assert metrics["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(hits / (size + 3))
    first, last = result.evaluation.by_octave()
    assert (first["first"], first["last"], last["first"], last["last"]) == (1, 16, 17, 32)
    assert last["loss"] * last["tokens"] == pytest.approx(late, rel=1e-5)
    assert first["tokens"] + last["tokens"] == size + 3
    loaded, metadata = load_model(result.run_dir / "last.safetensors", task="language")
    held_out = find_documents(str(folder), "**/*.txt").held_out(0.3)[1].digest
    carried = {"tokenizer": "bytes", "vocab_size": 257, "context": 32, "held_out": held_out}
    assert metadata.carried == carried
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name])


def test_it_starts_from_what_transformers_saved(make_config: Fields, tmp_path: Path) -> None:
    """The folder, or the file in it, which has the embeddings once."""
    config = make_config()
    task = config.task.open(config)
    arguments = task.model_arguments()
    source = task.build_model("llama", arguments)
    saved = tmp_path / "saved"
    source.save_pretrained(saved)
    for path, told in ((saved, "the folder "), (saved / "model.safetensors", "")):
        model = task.build_model("llama", arguments)
        line = task.start_from(path, model, "llama", arguments)
        assert line.startswith(f"starting from {told}{path}")
        assert f" {len(model.state_dict())} tensors taken" in line
        assert model.lm_head.weight is model.model.embed_tokens.weight
        for name, weight in source.state_dict().items():
            assert torch.equal(weight, model.state_dict()[name]), name
    untied = task.build_model("llama", {**arguments, "tie_word_embeddings": False})
    with pytest.raises(ConfigError, match=r"missing lm_head\.weight"):
        task.start_from(saved / "model.safetensors", untied, "llama", arguments)
    untied.save_pretrained(tmp_path / "untied")
    with pytest.raises(ConfigError, match=r"has two values of .*; the folder holds a llama"):
        task.start_from(tmp_path / "untied", model, "llama", arguments)


def test_stopped_and_resumed_it_is_the_same_run(make_config: Fields, tmp_path: Path) -> None:
    fields = {"updates": 7, "evaluate_every": 5, "checkpoint_every": 1, "ema_decay": 0.9}
    whole = train(make_config(**fields, output=str(tmp_path / "whole")))
    config = make_config(**fields)
    train_until(config, 3)
    resumed = train(config, resume=True)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
    kept = ("update", "train_loss", "test_loss", "test_bits_per_byte")
    for row, other in zip(whole.metrics["history"], resumed.metrics["history"], strict=True):
        assert {name: row[name] for name in kept} == {name: other[name] for name in kept}


def test_documents_that_are_no_text_are_named_and_counted(
    make_config: Fields, folder: Path
) -> None:
    damaged = folder / "part 1" / "9.txt"
    damaged.write_bytes(b"caf\xe9")
    with pytest.raises(DocumentError, match=r"9\.txt is no UTF-8 text: byte 3 "):
        train(make_config())
    result = train(make_config(skip_bad=True, updates=None, epochs=1, batch_size=2), overwrite=True)
    assert result.metrics["damaged_items"] == [str(damaged)]
    documents = result.metrics["train_documents"] + result.metrics["test_documents"]
    assert documents == 9
    with pytest.raises(DocumentError, match=r"absent\.txt cannot be read: No such file"):
        _read(Documents(folder, ("absent.txt",)), "absent.txt")
    for path in folder.glob("**/*.txt"):
        path.write_bytes(b"")
    with pytest.raises(DatasetError, match=r"7 documents of .* are all empty"):
        train(make_config(), overwrite=True)


def test_the_loss_is_of_tokens_and_of_none(make_config: Fields) -> None:
    config = make_config()
    task = config.task.open(config)
    model = task.build_model("llama", task.model_arguments())
    task.prepare(model)
    last = len(task.train_set) - 1
    assert len(pickle.dumps(task.collate)) < 1000  # for worker processes: without the documents
    batch = task.collate([task.train_set[0], task.train_set[last]])
    filled_up = (batch["targets"] == IGNORED).sum().item()
    assert filled_up
    loss, units = task.loss(model, batch, None)
    assert units == 64 - filled_up
    logits = model(batch["inputs"]).logits.flatten(0, 1)
    expected = F.cross_entropy(logits, batch["targets"].flatten(), reduction="mean") * units
    torch.testing.assert_close(loss, expected)
    loss, units = task.loss(model, task.collate([]), None)
    assert (loss.item(), units) == (0, 0)
    loss.backward()
    assert all(not weight.grad.any() for weight in model.parameters())


def test_activations_can_be_computed_again(make_config: Fields, tmp_path: Path) -> None:
    whole = train(make_config(updates=2))
    again = train(make_config(updates=2, gradient_checkpointing=True, output=str(tmp_path / "b")))
    assert again.model.model.layers[0].gradient_checkpointing
    for name, weight in whole.model.state_dict().items():
        torch.testing.assert_close(weight, again.model.state_dict()[name])


def test_mambas_scan_is_ours_with_the_same_result() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 11}
    model = build_language_model("mamba", sizes)
    tokens = torch.randint(0, 11, (2, 19))
    found = []
    for call in (
        lambda: model(tokens, use_cache=False).logits,
        lambda: next_token_logits(model, tokens),
    ):
        logits = call()
        gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
        found.append((logits, *gradients))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        whole = model(tokens).logits
        with scans_as_one_op():
            begun = model(tokens[:, :12], use_cache=True)
        rest = model(tokens[:, 12:13], cache=begun.cache, use_cache=True)
    torch.testing.assert_close(rest.logits[:, 0], whole[:, 12], rtol=1e-4, atol=1e-5)


def test_a_mamba_is_trained_and_measured_again(
    make_config: Fields, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1}
    config = make_config(model="mamba", updates=2, arguments=sizes)
    loss = train(config).metrics["test_loss"]
    assert main(["eval", f"{config.run.output}/last.safetensors", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(loss, rel=1e-5)


def test_mambas_rates_do_not_decay(make_config: Fields) -> None:
    model = build_language_model("mamba", {"hidden_size": 16, "num_hidden_layers": 1})
    optimizer = make_optimizer(model, make_config().optimisation)
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    mixer = model.backbone.layers[0].mixer
    assert decay[id(mixer.A_log)] == 0
    assert decay[id(mixer.in_proj.weight)] > 0


def test_a_tokenizer_of_transformers(
    make_config: Fields, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("**/*.txt"))]
    trained.train_from_iterator(texts, vocab_size=300, special_tokens=["<end>"])
    place = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<end>").save_pretrained(
        place
    )
    tokenizer = open_tokenizer(str(place))
    text = "état of the art – 名"
    tokens = tokenizer.encode(text).tolist()
    assert tokenizer.end not in tokens
    assert tokenizer.decode([*tokens, tokenizer.end]) == text
    text_of = tokenizer.stream()
    pieces = [text_of(token) for token in tokens]
    assert "".join([*pieces, text_of(None)]) == text
    assert not any("\ufffd" in piece for piece in pieces)
    result = train(make_config(tokenizer=str(place), updates=2))
    assert result.model.config.vocab_size == tokenizer.vocab_size
    assert result.model.config.eos_token_id == tokenizer.end
    metrics = result.evaluation.metrics
    size = result.metrics["test_bytes"]
    assert result.metrics["test_tokens"] < size
    nats = metrics["loss"] * result.metrics["test_tokens"]
    assert metrics["bits_per_byte"] == pytest.approx(nats / math.log(2) / size)
    # The checkpoint has all of it, wherever it goes.
    weights = str(result.run_dir / "last.safetensors")
    command = ["generate", weights, "--prompt", "état of", "--max-new-tokens", "9"]
    capsys.readouterr()
    assert main([*command, "--tokenizer", str(place)]) == 0
    said = capsys.readouterr().out
    place.rename(tmp_path / "away")
    assert main(command) == 0
    assert capsys.readouterr().out == said
    assert main(["eval", weights, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(metrics["loss"], rel=1e-5)


def test_a_tokenizer_with_gaps_that_writes_no_first_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"\u2581a": 0, "\u2581b": 5, "<end>": 10, "?": 3}
    built = Tokenizer(models.WordLevel(words, unk_token="?"))
    built.pre_tokenizer, built.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    saved = PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<end>", unk_token="?")
    saved.save_pretrained(tmp_path)
    tokenizer = open_tokenizer(str(tmp_path))
    assert tokenizer.vocab_size == 11
    prompt = tokenizer.encode("a b").tolist()
    text_of = tokenizer.stream([tokenizer.end, *prompt])
    assert [text_of(token) for token in (0, 5, None)] == [" a", " b", ""]
    sizes, decode = [], tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda x: sizes.append(len(x)) or decode(x))
    text_of = tokenizer.stream(prompt)
    assert [text_of(5) for _ in range(50)] == 50 * [" b"]
    assert max(sizes) == 3  # not all tokens each time
    with pytest.raises(UserError, match="no UTF-8 at character 1"):
        tokenizer.encode("a\udcff")


def test_a_tokenizer_that_writes_parts_of_characters_as_nothing(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path)
    tokenizer = open_tokenizer(str(tmp_path))
    text_of = tokenizer.stream(tokenizer.encode("a – ").tolist())
    pieces = [text_of(token) for token in [*tokenizer.encode("état, 名前 🙂.").tolist(), None]]
    assert "".join(pieces) == "état, 名前 🙂."


def test_generation_takes_nothing_from_a_checkpoint_but_weights() -> None:
    arguments = {"vocab_size": 257, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    model = build_language_model("gpt2", arguments).eval()
    model.generation_config.num_beams = 2
    model.generation_config.stop_strings = ["x"]
    before = model.generation_config
    tokenizer = ByteTokenizer()
    assert isinstance(generate(model, tokenizer, "abc", max_new_tokens=3), str)
    assert model.generation_config is before
    with pytest.raises(UserError, match="are 24 tokens; the model has 8 positions"):
        generate(model, tokenizer, "abc", max_new_tokens=20)
    with pytest.raises(UserError, match="temperature is 1e-40; it must be 0 or at least 1e-06"):
        generate(model, tokenizer, "abc", temperature=1e-40)


def test_a_checkpoints_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    carried = {"tokenizer": str(tmp_path / "gone"), "vocab_size": 9, "context": 32}

    def metadata(**more: Any) -> ModelMetadata:
        return ModelMetadata({"name": "language"}, "llama", {"vocab_size": 9}, {**carried, **more})

    with pytest.raises(ConfigError, match=r"gone that it names is not there; .* by --tokenizer"):
        carried_tokenizer(metadata())
    for name in ("../a.json", "/a.json", "..", ""):
        with pytest.raises(ValueError, match="cannot be stored in a checkpoint"):
            carried_tokenizer(metadata(tokenizer_files={name: "{}"}))
    with pytest.raises(TypeError, match="tokenizer_files must map names to texts"):
        carried_tokenizer(metadata(tokenizer_files={"a.json": 3}))
    with pytest.raises(ConfigError, match="cannot be read"):
        carried_tokenizer(metadata(tokenizer_files={"tokenizer.json": "{"}))


def test_files_of_a_tokenizer_may_hold_any_bytes(tmp_path: Path) -> None:
    content = bytes(range(256))

    class Saved(FolderTokenizer):
        def __init__(self, folder: str) -> None:
            self.read = (Path(folder) / "vocabulary.model").read_bytes()
            self._tokenizer = self

        def save_pretrained(self, folder: str) -> tuple[str, ...]:
            (Path(folder) / "vocabulary.model").write_bytes(self.read)
            return (f"{folder}/vocabulary.model", f"{folder}/absent.json")

    (tmp_path / "vocabulary.model").write_bytes(content)
    files = json.loads(json.dumps(Saved(str(tmp_path)).files()))
    assert list(files) == ["vocabulary.model"]
    assert Saved.of_files(files).read == content


def test_generation_leaves_the_global_generator_alone() -> None:
    model = build_language_model("llama", {**LLAMA, "vocab_size": 257}).eval()
    state = torch.get_rng_state()
    pieces: list[str] = []
    text = generate(model, ByteTokenizer(), "x", max_new_tokens=9, show=pieces.append)
    assert "".join(pieces) == text
    assert torch.equal(torch.get_rng_state(), state)


def test_the_command_leaves_a_page_and_measures_again(
    make_config: Fields, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(make_config(updates=4, evaluate_every=2).as_dict()))
    assert main(["train", str(recipe)]) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    assert "test bits per byte" in said.out
    assert "tokens/s" in said.err
    run_dir = tmp_path / "run"
    names = {path.name for path in run_dir.iterdir()}
    assert {"curves.png", "loss_by_position.png", "report.html"} <= names
    # A text would join the documents where a run lies among them.
    assert not list(run_dir.glob("**/*.txt"))
    assert "inner_loss.png" not in names  # a Llama has none
    page = (run_dir / "report.html").read_text()
    assert "17 to 32" in page
    assert "A sample" in page
    assert "What the model writes at the beginning of a document" in page
    weights = str(run_dir / "last.safetensors")
    metrics = json.loads((run_dir / "metrics.json").read_text())
    assert main(["eval", weights, "--json", "--batch-size", "3"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bits_per_byte"] == pytest.approx(metrics["test_bits_per_byte"], rel=1e-5)
    assert told["tokens"] == metrics["test_tokens"]
    assert main(["eval", weights, "--json", "--dtype", "bfloat16"]) == 0
    rounded = json.loads(capsys.readouterr().out)
    assert rounded["loss"] != told["loss"]
    assert rounded["loss"] == pytest.approx(told["loss"], rel=0.02)
    assert main(["eval", weights, "--split", "all"]) == 0
    assert f"{metrics['train_tokens'] + metrics['test_tokens']:,}" in capsys.readouterr().out
    assert main(["eval", weights, "--evaluation", "slide"]) == 2
    assert "holds a language model" in capsys.readouterr().err
    assert main(["predict", str(recipe), "--checkpoint", weights]) == 2
    assert "it predicts nothing for files" in capsys.readouterr().err
    assert main(["export", weights, str(tmp_path / "exported")]) == 2
    assert "holds a language model (for vision-ttt eval and generate)" in capsys.readouterr().err


def test_a_report_samples_no_more_than_a_model_has_positions_for(make_config: Fields) -> None:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2}
    result = train(make_config(model="gpt2", arguments=sizes, updates=1))
    assert result.task.report(result).texts[0].heading == "A sample"
