"""TTT language models in transformers' conventions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from vision_ttt.language.block import TTTBlock, TTTBlockState
from vision_ttt.language.cache import TTTCache, check_cache
from vision_ttt.language.configuration import TTTConfig
from vision_ttt.language.outputs import TTTModelOutput
from vision_ttt.language.packing import BOUNDARIES, Packing, first_tokens
from vision_ttt.language.padding import Padding
from vision_ttt.layers import DirectionalConv1d, GatedNorm, InnerLearner
from vision_ttt.layers.computed_buffer import ComputedBuffer

_WITHOUT_MEANING = frozenset(
    (
        *("token_type_ids", "tokenizer", "assistant_tokenizer", "streamer", "synced_gpus"),
        *("max_length_q", "max_length_k"),
    )
)
"""What tokenizers, collators and ``generate`` hand to every model and changes nothing here."""

_REFUSED = {
    "past_key_values": "the model keeps states instead of keys and values; pass cache",
    "cache_params": "the argument is called cache, as in transformers since 5.24",
    "output_attentions": "the model has no attention",
    "output_router_logits": "the model has no router",
    "is_causal": "the model is always causal",
    "cache_position": "tokens continue at the end of cache",
}
"""Arguments that transformers passes to models, usually as None → why they are refused."""


class TTTPreTrainedModel(PreTrainedModel):
    """What transformers' machinery knows of all TTT language models."""

    config_class = TTTConfig
    config: TTTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["TTTBlock"]
    _is_stateful = True

    def __init__(self, config: TTTConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        config.check()  # from_pretrained sets options after the configuration has been made

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw a module's own weights; those that were loaded have a mark, and ``init`` skips them.

        Matrices and embeddings are normal with standard deviation ``config.initializer_range``, the
        rest is as each module describes itself.
        """
        if isinstance(module, (nn.Linear, nn.Embedding)):
            init.normal_(module.weight, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)
        elif isinstance(module, GatedNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, (nn.RMSNorm, DirectionalConv1d, InnerLearner)):
            with init.guard_torch_init_functions():  # for which the mark counts, too
                module.reset_parameters()
        if isinstance(module, ComputedBuffer):
            module.init_non_persistent_buffers()


class TTTModel(TTTPreTrainedModel):
    """Embeddings, blocks and a final RMSNorm: token numbers [B, T] → tokens [B, T, D].

    Args:
        config: sizes and options.
    """

    def __init__(self, config: TTTConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TTTBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: TTTCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> TTTModelOutput | tuple[Any, ...]:
        """Run tokens, the next ones of their sequences where their cache is given.

        Args:
            input_ids: token numbers [B, T].
            attention_mask: 1 for tokens and 0 for padding [B, T], or [B, … + T] if it also covers
                the tokens that the cache has seen. A row returns the same results as without its
                padding, wherever the padding is. Padding is not read, and its outputs are 0.
            cache: the cache that an earlier call has returned. It is not changed.
            inputs_embeds: embeddings [B, T, D], in place of ``input_ids``.
            use_cache: return the cache after the last tokens. None: ``config.use_cache``, and in
                training no.
            output_hidden_states: return every block's output, too. None: as configured.
            return_dict: False for a tuple of what is not None. None: as configured.
            kwargs: what transformers gives to every model. ``position_ids`` [B, T], ``seq_idx``
                [B, T] and ``cu_seq_lens_q`` [N + 1] pack several documents into a row. A document
                begins where ``position_ids`` do not increase by 1, where ``seq_idx`` changes, or at
                the tokens in ``cu_seq_lens_q``. Each document returns the same results as in a row
                of its own, and the cache is the one after the last document. ``token_type_ids``,
                ``max_length_q`` and arguments of ``generate`` are ignored. ``past_key_values``,
                ``output_attentions`` and similar arguments must be None or False.

        Raises:
            TypeError: there is no such argument, or one has another type.
            ValueError: both or none of ``input_ids`` and ``inputs_embeds`` are given; the mask has
                another shape; the cache is another batch's or model's; a cache is used in training
                with gradient checkpointing, or for several documents; or one of ``kwargs`` asks for
                what there is not.
        """
        _check_further(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("one of input_ids and inputs_embeds must be given, got both or none")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        cache = TTTCache() if cache is None else cache
        self._check(x, cache, use_cache)
        padding = self._padding(attention_mask, x, cache)
        packing = self._packing(x, padding, cache, kwargs)
        if padding is None:
            hidden, blocks = self._run(
                x, cache.blocks, use_cache, output_hidden_states, packing=packing
            )
        else:
            hidden, blocks = self._run(
                padding.behind(x),
                cache.blocks,
                use_cache,
                output_hidden_states,
                padding.lengths,
                packing,
            )
            hidden = tuple(padding.back(each) for each in hidden)
        output = TTTModelOutput(
            last_hidden_state=hidden[-1],
            cache=TTTCache(blocks, cache.length + x.shape[1]) if use_cache else None,
            hidden_states=hidden if output_hidden_states else None,
        )
        if return_dict is None:
            return_dict = self.config.return_dict
        return output if return_dict else output.to_tuple()

    def _check(self, x: Tensor, cache: TTTCache, use_cache: bool) -> None:
        check_cache(cache)
        if cache.blocks and len(cache.blocks) != len(self.layers):
            raise ValueError(
                f"cache has states of {len(cache.blocks)} blocks, the model has {len(self.layers)}"
            )
        if cache.batch not in (None, len(x)):
            raise ValueError(
                f"cache has {cache.batch} sequences, the call has {len(x)}; "
                "cache.select repeats and chooses them"
            )
        if x.shape[1] == 0:
            raise ValueError(f"at least one token is needed, got tokens {list(x.shape[:2])}")
        # Reentrant checkpointing would not differentiate states, and nothing would say so.
        recomputed = self.training and torch.is_grad_enabled() and self._checkpoints()
        if recomputed and (use_cache or cache.blocks):
            raise ValueError("gradient checkpointing keeps no cache: use_cache must be False")

    def _checkpoints(self) -> bool:
        return any(block.gradient_checkpointing for block in self.layers)

    def _padding(self, mask: Tensor | None, x: Tensor, cache: TTTCache) -> Padding | None:
        """Where the padding of tokens x [B, T, D] is, None where there is none."""
        if mask is None:
            return None
        batch, length = x.shape[:2]
        if mask.shape != (batch, length) and mask.shape != (batch, cache.length + length):
            seen = f" or [{batch}, {cache.length + length}]" if cache.length else ""
            raise ValueError(
                f"attention_mask must have shape [{batch}, {length}]{seen}, got {list(mask.shape)}"
            )
        return Padding.of(mask[:, -length:])

    def _packing(
        self, x: Tensor, padding: Padding | None, cache: TTTCache, boundaries: dict[str, Any]
    ) -> Packing | None:
        """Where the documents of rows x [B, T, D] are, None where each row is one."""
        begins = first_tokens(x, padding, boundaries)
        if begins is None:
            return None
        if cache.blocks:
            raise ValueError(
                "a cache continues one document in each row, but further documents begin in "
                f"{', '.join(name for name in BOUNDARIES if boundaries.get(name) is not None)}"
            )
        return Packing.of(begins, padding)

    def _run(
        self,
        x: Tensor,
        before: Sequence[TTTBlockState],
        return_state: bool,
        all_hidden: bool,
        lengths: Tensor | None = None,
        packing: Packing | None = None,
    ) -> tuple[tuple[Tensor, ...], list[TTTBlockState]]:
        """Hidden states [B, T, D], all or the last, and the blocks' states if they are wanted.

        These are after ``lengths`` [B] tokens of each row, after all without, and where rows are
        packed after their last documents.
        """
        hidden, after = [], []
        states = before or [None] * len(self.layers)
        for block, state in zip(self.layers, states, strict=True):
            x = block(x, state, return_state, lengths, packing)
            if return_state:
                x, state = x
                after.append(state)
            if all_hidden:
                hidden.append(x)
        return (*hidden, self.norm(x)), after


def _check_further(arguments: dict[str, Any]) -> None:
    """Refuse arguments of transformers' that would change the result of another model."""
    for name, value in arguments.items():
        if name in _WITHOUT_MEANING or name in BOUNDARIES:
            continue
        if name not in _REFUSED:
            raise TypeError(f"a TTT language model has no argument {name}")
        if value is not None and value is not (name == "is_causal"):
            received = list(value.shape) if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name} must be None, got {received}: {_REFUSED[name]}")
