"""What TTT language models return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from transformers.utils import ModelOutput

from vision_ttt.language.cache import TTTCache


@dataclass
class TTTModelOutput(ModelOutput):
    """The output of the final norm; the cache and the hidden states where they are asked for.

    ``last_hidden_state`` is [B, T, D]; ``cache`` is the cache after the last token;
    ``hidden_states`` are every block's output and ``last_hidden_state``, each [B, T, D].
    """

    last_hidden_state: Tensor | None = None
    cache: TTTCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: ClassVar[None] = None  # transformers' generic heads ask for them


@dataclass
class TTTCausalLMOutput(ModelOutput):
    """Logits [B, T, V] of every next token, the mean loss of the labels, and the rest as above."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: TTTCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
