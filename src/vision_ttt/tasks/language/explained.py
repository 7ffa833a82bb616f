"""A language model to be looked into, on sequences of its test documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.tasks.language.config import LanguageSection


@dataclass(frozen=True)
class ReadModel:
    """A language model in the place of an image backbone: its input are tokens [B, T]."""

    model: nn.Module

    @property
    def around(self) -> nn.Module:
        """The model itself."""
        return self.model

    def prepare(self, tokens: Tensor) -> Tensor:
        """Return tokens [T] as they are."""
        return tokens


def test_sequences(metadata: ModelMetadata, count: int) -> list[Callable[[], Tensor]]:
    """Return what opens the first sequences of a checkpoint's test documents, tokens [T] each.

    Raises:
        UserError: the documents cannot be read.
    """
    task = LanguageSection.reopen(metadata, {}, part="test", precision="float32", num_workers=0)
    whole = max(task.test_set.sequences - 1, 1)  # the last one is filled up
    return [partial(_tokens, task.test_set, index) for index in range(min(count, whole))]


def _tokens(sequences: object, index: int) -> Tensor:
    return sequences[index][0]
