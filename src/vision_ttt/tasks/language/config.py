"""The sections `task` and `data` of a run that trains a language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vision_ttt.engine.config import ConfigError, TaskSection, TrainConfig
from vision_ttt.engine.section import INNER_FRACTION, Range, Section, number, refuse_unused
from vision_ttt.extras import require

if TYPE_CHECKING:  # they need PyTorch and transformers
    from torch import nn

    from vision_ttt.engine.checkpoint import ModelMetadata
    from vision_ttt.tasks.language.task import Language

LONGEST_CONTEXT = 2**20
"""Tokens; more is a typing error."""
CONTEXT = Range(2, LONGEST_CONTEXT, f"from 2 to {LONGEST_CONTEXT:,}")
"""The accepted numbers of them."""


@dataclass(frozen=True)
class LanguageData(Section):
    """Documents, and how they become the sequences that the model sees."""

    dataset: str = "stdlib"
    """A folder of text files, a folder of vision-ttt tokenize, or stdlib: the sources of the Python
    that runs, without tests, installed packages, applications and tables of characters."""
    validation: str | None = None
    """Another one with the test documents; null: test_share of dataset are held out."""
    pattern: str = "**/*.txt"
    """Which files of the folder are documents, e.g. "**/*.py"; ** stands for folders at any
    depth. Each row of .jsonl, .jsonl.zst and .parquet files is a document."""
    field: str = "text"
    """Field of these rows that holds the text."""
    test_share: float = number(0.05, INNER_FRACTION)
    """Share of the documents that are held out for test (above 0 and below 1), chosen by their
    names."""
    tokenizer: str = "bytes"
    """bytes: a token for each byte of UTF-8, and one for a document's end; or the folder of a
    tokenizer of transformers, whose end-of-sequence token ends documents."""
    context: int = number(2048, CONTEXT)
    """Tokens of a sequence. Documents are concatenated and cut; the last sequence is padded."""


@dataclass(frozen=True)
class LanguageSection(TaskSection):
    """Language modelling: the next token, by cross-entropy (causal models of transformers)."""

    name: Literal["language"] = "language"
    """Name of the task."""

    DATA: ClassVar[type[LanguageData]] = LanguageData
    HOLDS: ClassVar[str] = "a language model (for vision-ttt eval and generate)"
    PACKABLE: ClassVar[bool] = False

    def check(self, config: TrainConfig) -> None:
        """Raise ConfigError where a field would be ignored."""
        if config.model.drop_path is not None:
            raise ConfigError(
                f"drop_path is {config.model.drop_path}; language models have none, it must be null"
            )
        if config.data.dataset == "stdlib":
            refuse_unused(config.data, ["pattern"], "dataset is 'stdlib', whose selection is fixed")

    def open(self, config: TrainConfig) -> Language:
        """Open the documents and the tokenizer."""
        require("lm", "the task language")
        from vision_ttt.tasks.language.task import Language

        return Language(config)

    @classmethod
    def rebuild(cls, metadata: ModelMetadata) -> nn.Module:
        """Build the model that a checkpoint describes."""
        require("lm", cls.HOLDS)
        from vision_ttt.tasks.language.metadata import check_carried
        from vision_ttt.tasks.language.models import build_language_model

        check_carried(metadata)
        return build_language_model(metadata.model, metadata.model_args)

    @classmethod
    def reopen(
        cls, metadata: ModelMetadata, changes: Mapping[str, Any], **machine: Any
    ) -> Language:
        """Open a checkpoint's documents again, or other ones."""
        require("lm", cls.HOLDS)
        from vision_ttt.tasks.language.metadata import reopen

        return reopen(cls(), metadata, changes, **machine)
