"""The contenders of `bench lm`: language models of one size, and what they keep of a sequence."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    StaticCache,
)

from studies.bench.names import LANGUAGE_MODELS, LANGUAGE_VARIANTS
from vision_ttt.acceleration.training import use_composite_ops
from vision_ttt.bench.runtimes import pack
from vision_ttt.errors import UserError, suggestions
from vision_ttt.language import TTTCache, TTTConfig, TTTForCausalLM
from vision_ttt.ops import states, use_backend
from vision_ttt.tasks.language.next_tokens import scans_as_one_op


@dataclass(frozen=True)
class LanguageContender:
    """A language model by a label of `bench lm`: NAME, or NAME:VARIANT."""

    label: str
    name: str
    variant: str
    """One of :data:`studies.bench.names.LANGUAGE_VARIANTS`, or empty."""

    @property
    def packs(self) -> bool:
        """Whether its products are packed by ``for_inference``."""
        return self.variant in ("for_inference", "static")

    def build(self, size: TTTConfig) -> nn.Module:
        """The model with random weights, as large as another one's configuration says."""
        if self.name == "llama":
            return LlamaForCausalLM(_llama(size))
        if self.name == "mamba":
            own = sizes_of(size)
            names = ("vocab_size", "hidden_size", "tie_word_embeddings")
            layers = 2 * own["num_hidden_layers"]  # one of its blocks stands for mixer or MLP
            kept = {name: own[name] for name in names}
            return MambaForCausalLM(MambaConfig(**kept, num_hidden_layers=layers))
        layer, _, backbone = self.name.removeprefix("ttt-").partition("-")
        like = TTTConfig.of_size("125m", layer=layer, backbone=backbone or "transformer")
        kind = ("ttt_layer_type", "ttt_base_lr", "use_gate", "share_qk", "pre_conv")
        options = {name: getattr(like, name) for name in kind}
        model = TTTForCausalLM(TTTConfig(**{**sizes_of(size), **options}))
        if self.variant == "for_training":
            use_composite_ops(model)
        return model

    def deploy(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        """The model for inference in a dtype, its products packed where that is asked for."""
        return pack(model, dtype) if self.packs else model.eval().to(dtype)

    def ops(self) -> AbstractContextManager[None]:
        """The backends of its ops, in whose context its calls run."""
        if self.name == "mamba":
            return scans_as_one_op()
        return use_backend("dual") if self.variant == "dual" else nullcontext()

    def read(
        self, model: nn.Module, tokens: Tensor, cache: Any = None, room: int = 0
    ) -> tuple[Tensor, Any]:
        """Run tokens [B, T], the next ones where there is a cache.

        Args:
            room: tokens that a static cache is to hold beyond these.

        Returns:
            The last token's logits [B, 1, V], and the cache after it.
        """
        if cache is None and self.variant == "static":
            cache = StaticCache(model.config, max_cache_len=tokens.shape[1] + room)
        with self.ops():
            out = model(tokens, cache=cache, use_cache=True, logits_to_keep=1)
        return out["logits"], out["cache"]

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """The loss of predicting tokens [B, T] each from those before."""
        return model(tokens, labels=tokens, use_cache=False)["loss"]


def find_language_contenders(labels: Iterable[str]) -> list[LanguageContender]:
    """The contenders of these labels, each once.

    Raises:
        UserError: a label names no contender.
    """
    known = [
        label
        for name in LANGUAGE_MODELS
        for label in (name, *(f"{name}:{variant}" for variant in LANGUAGE_VARIANTS[name]))
    ]
    found = []
    for label in dict.fromkeys(labels):
        if label not in known:
            raise UserError(f"unknown model {label!r}; {suggestions(label, known)}")
        name, _, variant = label.partition(":")
        found.append(LanguageContender(label, name, variant))
    return found


def sizes_of(config: TTTConfig) -> dict[str, Any]:
    """What two configurations of models of the same size share."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "tie_word_embeddings", "mini_batch_size")
    return {name: getattr(config, name) for name in names}


def _llama(size: TTTConfig) -> LlamaConfig:
    own = sizes_of(size)
    del own["mini_batch_size"]
    # RoPE is computed for as many positions as a call has, whatever the configuration says.
    return LlamaConfig(**own, attn_implementation="sdpa")


def copied(cache: Any) -> Any:
    """A cache that a call may change without changing this one."""
    return cache if isinstance(cache, TTTCache) else copy.deepcopy(cache)


def cache_bytes(cache: Any) -> int:
    """The memory of the states, or of the keys and values, that a cache keeps."""
    storages = (x.untyped_storage() for x in _tensors(cache))
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def _tensors(cache: Any) -> Iterator[Tensor]:
    if not isinstance(cache, TTTCache):
        for layer in cache.layers:
            for value in vars(layer).values():
                several = value.values() if isinstance(value, dict) else [value]
                yield from (x for x in several if isinstance(x, Tensor))
        return
    found: list[Tensor] = []
    for block in cache.blocks:
        states.of_each(lambda x: found.append(x) or x, block)
    yield from found
