"""Continuing a text with a language model, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from vision_ttt.errors import UserError
from vision_ttt.tasks.language.next_tokens import scans_as_one_op
from vision_ttt.tasks.language.tokenizers import Tokenizer


def generate(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    show: Callable[[str], None] = lambda text: None,
) -> str:
    """Return what a model writes after `prompt`, which begins a document.

    Args:
        model: in evaluation mode; with a cache where it has one.
        max_new_tokens: it ends there, or where the document ends.
        temperature: that logits are divided by before a token is drawn; 0: the most probable.
        top_k: tokens that are drawn from, the most probable ones; 0: all.
        seed: of what is drawn. The global generators are left as they were.
        show: called with each piece of the text as soon as it is there.

    Raises:
        UserError: the model's logits are not finite.
    """
    device = model.device
    tokens = [tokenizer.end, *tokenizer.encode(prompt).tolist()]
    streamer = _Streamer(tokenizer, show)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": 1.0}
    generators = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with generators, scans_as_one_op():
        torch.manual_seed(seed)
        model.generate(
            torch.tensor([tokens], device=device),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.int64, device=device),
            max_new_tokens=max_new_tokens,
            eos_token_id=tokenizer.end,
            pad_token_id=tokenizer.end,
            use_cache=True,
            logits_processor=[_RefuseNaN()],
            streamer=streamer,
            **sampling,
        )
    return "".join(streamer.pieces)


class _Streamer(BaseStreamer):
    """Turns tokens into text as they come; the prompt comes first, and is not shown."""

    def __init__(self, tokenizer: Tokenizer, show: Callable[[str], None]) -> None:
        self.text_of = tokenizer.stream()
        self.show = show
        self.pieces: list[str] = []
        self.begun = False

    def put(self, value: Tensor) -> None:
        if not self.begun:
            self.begun = True
            return
        for token in value.flatten().tolist():
            self._add(self.text_of(token))

    def end(self) -> None:
        self._add(self.text_of(None))

    def _add(self, piece: str) -> None:
        if piece:
            self.pieces.append(piece)
            self.show(piece)


class _RefuseNaN(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if scores.isnan().any():
            raise UserError("the model predicts NaN: its weights are damaged")
        return scores
