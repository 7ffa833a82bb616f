"""Continuing a text with a language model, token by token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from vision_ttt.errors import DamagedModel, UserError
from vision_ttt.language.configuration import TTTConfig
from vision_ttt.tasks.language.next_tokens import scans_as_one_op
from vision_ttt.tasks.language.tokenizers import Tokenizer

_LOWEST_TEMPERATURE = 1e-6
"""Logits divided by less may be beyond what float32 holds."""


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
        UserError: the model's logits are not finite, the temperature is too close to 0, or the
            prompt and what is to follow are longer than what the model has positions for.
    """
    if 0 < temperature < _LOWEST_TEMPERATURE:
        raise UserError(
            f"the temperature is {temperature}; it must be 0 or at least {_LOWEST_TEMPERATURE}"
        )
    device = model.device
    tokens = [tokenizer.end, *tokenizer.encode(prompt).tolist()]
    streamer = _Streamer(tokenizer, tokens, show)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": 1.0}
    generators = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    too_long = _saying_what_is_too_long(model, len(tokens) + max_new_tokens)
    own = _own_generation_config(model)
    with generators, scans_as_one_op(), own, _any_length(model), too_long:
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


@contextmanager
def _own_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Nothing of what a checkpoint says of generation, such as beams, which cannot be streamed."""
    before = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


@contextmanager
def _any_length(model: PreTrainedModel) -> Iterator[None]:
    """Silence transformers' warning of long texts: nothing in a TTT model depends on the length."""
    logger = logging.getLogger("transformers.generation.stopping_criteria")
    before = logger.disabled
    logger.disabled = before or isinstance(model.config, TTTConfig)
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _saying_what_is_too_long(model: PreTrainedModel, length: int) -> Iterator[None]:
    """Models with a table of positions end where it ends; others may go on."""
    try:
        yield
    except IndexError as error:
        places = getattr(model.config, "max_position_embeddings", None)
        if places is None or length <= places:
            raise
        raise UserError(
            f"the prompt and the new tokens are {length} tokens; the model has {places} positions"
        ) from error


class _Streamer(BaseStreamer):
    """Turns tokens into text as they come; the prompt comes first, and is not shown."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], show: Callable[[str], None]
    ) -> None:
        self.text_of = tokenizer.stream(prompt)
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
        if (scores.isnan() | (scores == torch.inf)).any():
            raise DamagedModel("the model predicts NaN or infinity: its weights are damaged")
        return scores
