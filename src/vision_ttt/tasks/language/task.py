"""Training a language model: documents packed to sequences, the next token of each token."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vision_ttt.data import DatasetError
from vision_ttt.data.documents import Documents, find_documents
from vision_ttt.data.loading import without_damaged
from vision_ttt.engine.building import load_weights
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.engine.config import ConfigError, TrainConfig
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.evaluation import autocast
from vision_ttt.engine.task import Batch, Metric, Moment, Report, Task
from vision_ttt.engine.train import TrainResult
from vision_ttt.files import same_path
from vision_ttt.tasks.language.evaluation import LanguageEvaluation, evaluate, token_losses
from vision_ttt.tasks.language.metadata import check_carried
from vision_ttt.tasks.language.models import build_language_model, model_arguments
from vision_ttt.tasks.language.next_tokens import next_token_logits
from vision_ttt.tasks.language.packing import IGNORED, Sequences, pack
from vision_ttt.tasks.language.pretrained import load_pretrained
from vision_ttt.tasks.language.token_folder import is_token_folder, read_token_folder
from vision_ttt.tasks.language.tokenizers import Tokenizer, open_tokenizer


class Language(Task):
    """Cross-entropy of the next token."""

    unit = "tokens"
    primary = Metric("bits_per_byte", higher_is_better=False)
    config: TrainConfig
    train_set: Sequences
    test_set: Sequences

    def __init__(self, config: TrainConfig, tokenizer: Tokenizer | None = None) -> None:
        """Find the documents and open the tokenizer, unless a checkpoint's own is given.

        Raises:
            DatasetError: there are no documents, or too few.
            ConfigError: there is no such tokenizer.
        """
        self.config = config
        data = config.data
        self.precision = config.machine.precision
        self.context = self.units_per_item = data.context
        self.tokenizer = open_tokenizer(data.tokenizer) if tokenizer is None else tokenizer
        self.tokenizer_files = self.tokenizer.files()
        self.documents = self._find(data.dataset)
        self.validation = None if data.validation is None else self._find(data.validation)

    def model_arguments(self) -> dict[str, Any]:
        """Return the size of the vocabulary, its ends, the context, and the config's own."""
        return model_arguments(
            self.config.model.name,
            self.config.model.arguments,
            vocab_size=self.tokenizer.vocab_size,
            end=self.tokenizer.end,
            context=self.context,
        )

    def build_model(self, name: str, arguments: Mapping[str, Any]) -> nn.Module:
        """Build a causal language model of transformers, or ours."""
        return build_language_model(name, arguments)

    def checkpoint_gradients(self, model: nn.Module) -> None:
        """Switch transformers' gradient checkpointing on."""
        if not model.supports_gradient_checkpointing:
            raise AttributeError("gradient checkpointing is not supported")
        # Its later name, where transformers has it.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})

    def start_from(
        self, path: Path, model: nn.Module, name: str, model_args: Mapping[str, Any]
    ) -> str:
        """Start from a safetensors file, or from a folder that transformers wrote.

        Raises:
            FileNotFoundError, CheckpointError: there is none, or it is damaged.
            ConfigError: the weights are another model's.
        """
        if not path.is_dir():
            return super().start_from(path, model, name, model_args)
        source = load_pretrained(path)
        try:
            load_weights(model, source.state_dict(), path)
        except ConfigError as error:
            kind = source.config.model_type
            raise ConfigError(f"initial_weights: {error}; the folder holds a {kind}") from error
        taken = len(model.state_dict())
        return f"starting from the folder {path} of transformers: {taken} tensors taken."

    def prepare(self, model: nn.Module) -> None:
        """Read and pack the documents.

        Raises:
            DocumentError: one cannot be read, and is not to be skipped.
            DatasetError: there are too few.
        """
        self.train_set, self.test_set = map(self._packed, self._parts())
        damaged = (*self.train_set.packed.damaged, *self.test_set.packed.damaged)
        if damaged and not self.config.run.skip_bad:
            raise damaged[0]

    @property
    def collate(self) -> Callable[[Sequence[Any]], Batch]:
        """Stacks the sequences, and lists the documents that could not be read."""
        return partial(_stacked, self.context)

    def loss(self, forward: nn.Module, batch: Batch, moment: Moment) -> tuple[Tensor, int]:
        """Return the summed cross-entropy in nats, and the number of tokens."""
        inputs = batch["inputs"]
        with autocast(inputs.device, self.precision):
            logits = next_token_logits(forward, inputs)
        if not len(inputs):
            return logits.sum(), 0
        return token_losses(logits, batch["targets"]).sum(), batch["tokens"]

    def evaluate(
        self,
        model: nn.Module,
        loader: DataLoader,
        accelerator: Accelerator,
        *,
        damaged: DamagedItems,
        between: Callable[[], None],
    ) -> LanguageEvaluation:
        """Return the loss, by position, and what follows from it."""
        return evaluate(
            model,
            self.test_set,
            loader,
            accelerator,
            damaged=damaged,
            precision=self.precision,
            between=between,
        )

    def example(self) -> Tensor:
        """Return a sequence."""
        return torch.full((1, self.context), self.tokenizer.end)

    def carried(self) -> dict[str, Any]:
        """Return the tokenizer's name and files, the size of its vocabulary, the context, and what
        was held out."""
        files = {"tokenizer_files": self.tokenizer_files} if self.tokenizer_files else {}
        held_out = {} if self.validation is not None else {"held_out": self._parts()[1].digest}
        return {
            "tokenizer": self.config.data.tokenizer,
            **files,
            "vocab_size": self.tokenizer.vocab_size,
            "context": self.context,
            **held_out,
        }

    def described(self) -> dict[str, Any]:
        """Return the source's name and the numbers of documents, tokens and bytes."""
        description: dict[str, Any] = {"dataset": self.config.data.dataset}
        for name, sequences in (("train", self.train_set), ("test", self.test_set)):
            description[f"{name}_documents"] = sequences.packed.documents
            description[f"{name}_tokens"] = sequences.predicted
            description[f"{name}_bytes"] = sequences.packed.bytes
        return description

    def figures(self, evaluation: LanguageEvaluation) -> dict[str, Any]:
        """Return the metrics, the number of tokens, and the loss by position."""
        tokens = int(evaluation.counts.sum())
        return {**evaluation.metrics, "tokens": tokens, "by_position": evaluation.by_octave()}

    def table(self, title: str, figures: Mapping[str, Any]) -> Table:
        """Return the metrics, and a line for each octave of positions."""
        table = Table(title=title, show_header=False)
        for name, value in figures.items():
            if name != "by_position":
                table.add_row(name, f"{value:,}" if name == "tokens" else f"{value:.6g}")
        for row in figures["by_position"]:
            table.add_row(
                f"perplexity at positions {row['first']:,} to {row['last']:,}",
                f"{row['perplexity']:.6g}",
            )
        return table

    def report(self, result: TrainResult) -> Report:
        """Write the curves, the loss by position, the inner losses and a sample."""
        from vision_ttt.tasks.language.report import write_report

        return write_report(self, result)

    def set_evaluation_data(self, metadata: ModelMetadata, part: str) -> None:
        """Set `test_set` to a part of the documents as the model of a checkpoint expects it.

        Args:
            part: "test", "train" or "all".

        Raises:
            ConfigError: the tokenizer has another vocabulary than the checkpoint's.
            DatasetError: there are too few documents to divide, or the run held out others of the
                same source for test.
        """
        carried = check_carried(metadata)
        if carried["vocab_size"] != self.tokenizer.vocab_size:
            raise ConfigError(
                f"tokenizer {carried['tokenizer']} has {self.tokenizer.vocab_size} tokens; the"
                f" checkpoint's had {carried['vocab_size']}"
            )
        documents = self.documents
        if part != "all":
            parts = self._parts()
            documents = parts[part == "test"]
            same_source = same_path(metadata.data.get("dataset", ""), self.config.data.dataset)
            drawn = "held_out" in carried and self.validation is None
            if same_source and drawn and carried["held_out"] != parts[1].digest:
                raise DatasetError(
                    f"the checkpoint's run held out other documents of {self.config.data.dataset}"
                    " for test, and has trained on some of the documents that are held out now:"
                    " files were added, removed or renamed; evaluate part 'all' (--split all)"
                )
        self.test_set = self._packed(documents)

    def _find(self, dataset: str) -> Documents | Path:
        """The documents of a source, or the folder of their tokens."""
        dataset = os.path.expanduser(dataset)
        if is_token_folder(dataset):
            return Path(dataset)
        return find_documents(dataset, self.config.data.pattern)

    def _parts(self) -> tuple[Documents | Path, Documents | Path]:
        """What is trained on, and what is tested on."""
        if self.validation is not None:
            return self.documents, self.validation
        if isinstance(self.documents, Path):
            raise ConfigError(
                f"dataset {self.documents} holds tokens, of which none are held out: give another"
                " folder as validation, or evaluate with --split all"
            )
        return self.documents.held_out(self.config.data.test_share)

    def _packed(self, documents: Documents | Path) -> Sequences:
        if isinstance(documents, Path):
            packed = read_token_folder(documents, self.tokenizer)
            return Sequences(packed, self.context, self.tokenizer.end)
        packed = pack(documents, self.tokenizer, self.config.data.field)
        if not packed.bytes:
            raise next(
                iter(packed.damaged),
                DatasetError(f"{len(documents.names)} documents of {documents.root} are all empty"),
            )
        return Sequences(packed, self.context, self.tokenizer.end)


def _stacked(context: int, items: Sequence[Any]) -> Batch:
    good, damaged = without_damaged(items)
    inputs, targets, indices = zip(*good, strict=True) if good else ((), (), ())
    empty = torch.empty(0, context, dtype=torch.int64)
    stacked = torch.stack(targets) if good else empty
    return {
        "inputs": torch.stack(inputs) if good else empty,
        "targets": stacked,
        # Counted here, where it makes no device wait.
        "tokens": int((stacked != IGNORED).sum()),
        "indices": torch.tensor(indices, dtype=torch.int64),
        "damaged": damaged,
    }
