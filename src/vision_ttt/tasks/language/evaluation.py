"""Evaluation of a language model: loss, bits per byte, and the loss by the token's position."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.evaluation import autocast, rows_of_items
from vision_ttt.engine.task import Batch
from vision_ttt.tasks.language.next_tokens import next_token_logits
from vision_ttt.tasks.language.packing import IGNORED, Sequences
from vision_ttt.tasks.language.positions import band_edges, band_of_position, octaves


@dataclass(frozen=True)
class LanguageEvaluation:
    """What a model says about documents, packed to sequences, each token predicted once."""

    nats: Tensor
    """Summed loss of each band of positions [K] float64."""
    counts: Tensor
    """Tokens in it [K] int64."""
    edges: list[int]
    """Last position of each band, from 1."""
    hits: int
    """Number of tokens that the model rated the most probable."""
    bytes: int
    """Of the documents' text in UTF-8, without the ends of documents."""

    @cached_property
    def loss(self) -> float:
        """Mean cross-entropy in nats per token, ends of documents among them."""
        return (self.nats.sum() / self.counts.sum()).item()

    @property
    def bits_per_byte(self) -> float:
        """The summed loss in bits per byte of text, including the ends of documents. The measure
        does not depend on the tokenizer."""
        return self.nats.sum().item() / math.log(2) / self.bytes

    @property
    def metrics(self) -> dict[str, float]:
        """Loss, perplexity, bits per byte, and the share of tokens that are foreseen."""
        return {
            "loss": self.loss,
            "perplexity": _perplexity(self.loss),
            "bits_per_byte": self.bits_per_byte,
            "accuracy": self.hits / self.counts.sum().item(),
        }

    def by_band(self) -> list[dict[str, Any]]:
        """Return `first` and `last` position, `tokens` and `loss` of each band that has tokens."""
        return self._rows([[band] for band in range(len(self.edges))])

    def by_octave(self) -> list[dict[str, Any]]:
        """Return the same of each octave of positions, with its `perplexity`."""
        rows = self._rows(octaves(self.edges))
        return [{**row, "perplexity": _perplexity(row["loss"])} for row in rows]

    def _rows(self, groups: list[list[int]]) -> list[dict[str, Any]]:
        starts = [0, *self.edges]
        rows = []
        for group in groups:
            tokens = self.counts[group].sum().item()
            if tokens:
                loss = self.nats[group].sum().item() / tokens
                place = {"first": starts[group[0]] + 1, "last": self.edges[group[-1]]}
                rows.append({**place, "tokens": tokens, "loss": loss})
        return rows


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of logits [B, T, V] at targets [B, T]: [B, T] float32, 0 if none."""
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view_as(targets)


def evaluate(
    model: nn.Module,
    sequences: Sequences,
    loader: DataLoader,
    accelerator: Accelerator,
    *,
    damaged: DamagedItems,
    precision: str = "float32",
    between: Callable[[], None] = lambda: None,
) -> LanguageEvaluation:
    """Run `model` (in evaluation mode) over `loader`, this process's share of `sequences`.

    Every process gets the evaluation of all sequences. `between` is called before each batch.

    Raises:
        DocumentError: a document could not be read and is not to be skipped.
        DatasetError: there is no sequence.
    """
    edges = band_edges(sequences.context)
    bands = band_of_position(sequences.context).to(accelerator.device)

    def measure(batch: Batch) -> dict[str, Tensor]:
        inputs, targets = batch["inputs"], batch["targets"]
        with autocast(accelerator.device, precision):
            logits = next_token_logits(model, inputs)
        is_token = targets != IGNORED
        nats = token_losses(logits, targets)
        hits = (logits.argmax(-1) == targets) & is_token
        empty = nats.new_zeros(len(inputs), len(edges), dtype=torch.float64)
        return {
            "nats": empty.index_add(1, bands, nats.double()),
            "counts": empty.index_add(1, bands, is_token.double()).long(),
            "hits": hits.sum(1),
        }

    rows = rows_of_items(measure, model, loader, accelerator, damaged=damaged, between=between)
    return LanguageEvaluation(
        rows["nats"].sum(0),
        rows["counts"].sum(0),
        edges,
        int(rows["hits"].sum()),
        sequences.packed.bytes,
    )


def _perplexity(loss: float) -> float:
    return torch.tensor(loss, dtype=torch.float64).exp().item()  # infinite rather than an error
