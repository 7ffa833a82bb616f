"""TTT language models with a head: loss and generation."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin

from vision_ttt.language.cache import TTTCache, check_cache
from vision_ttt.language.configuration import TTTConfig
from vision_ttt.language.model import TTTModel, TTTPreTrainedModel
from vision_ttt.language.outputs import TTTCausalLMOutput
from vision_ttt.language.packing import first_tokens
from vision_ttt.language.padding import Padding
from vision_ttt.ops.states import take

_IGNORED = -100
"""The label of what is not to be predicted, transformers' and PyTorch's."""


class TTTForCausalLM(TTTPreTrainedModel, GenerationMixin):
    """A causal language model of TTT layers (TTT, Sec. 3): token numbers [B, T] → logits [B, T, V].

    ``generate`` is transformers': greedy, sampling and beam search, of batches with padding on the
    left, and with a streamer. It continues from ``cache``, given the whole sequences as
    ``input_ids``, the tokens that the cache has seen included, or their embeddings as
    ``inputs_embeds``. With ``num_beams`` or ``num_return_sequences`` the cache must hold each
    sequence that many times.

    Args:
        config: sizes and options.
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    accepts_loss_kwargs = True  # for Trainer: forward has num_items_in_batch

    def __init__(self, config: TTTConfig) -> None:
        super().__init__(config)
        self.model = TTTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: TTTCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        token_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> TTTCausalLMOutput | tuple[Any, ...]:
        """Logits of the next tokens, and the loss if labels are given.

        Args beyond :meth:`TTTModel.forward`'s:
            labels: token numbers [B, T], as a rule ``input_ids``: the logits of a token are
                compared with the label of its document's next token, wherever padding stands.
                Labels of -100 and those of padding are left out, as are those of documents' first
                tokens. The loss is computed in float32.
            logits_to_keep: return the logits of this many last tokens only, 0 for all; or those of
                some places [n], which is not for a loss.
            num_items_in_batch: divide the summed loss by it. None: by the number of labels.
            token_type_ids: of no meaning; tokenizers return them.

        Raises:
            TypeError: as there.
            ValueError: as there, labels do not go with the logits, or ``logits_to_keep`` is
                negative or has another number of dimensions.
        """
        output = self.model(
            input_ids,
            attention_mask=attention_mask,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        hidden = output.last_hidden_state
        logits = self.lm_head(_kept(hidden, logits_to_keep))
        padding = None
        if attention_mask is not None:
            padding = Padding.of(_kept(attention_mask[:, -hidden.shape[1] :], logits_to_keep))
        loss = None
        if labels is not None:
            if isinstance(logits_to_keep, Tensor):
                raise ValueError("labels require logits_to_keep to be a number, got a tensor")
            if labels.shape != logits.shape[:2]:
                raise ValueError(
                    f"labels must have the logits' shape {list(logits.shape[:2])}, got "
                    f"{list(labels.shape)}; logits_to_keep is {logits_to_keep}"
                )
            labels = _further_labels(labels, output.last_hidden_state, attention_mask, kwargs)
            loss = _loss(logits, labels, padding, num_items_in_batch)
        if padding is not None:
            # For gradients of the logits; after the loss, whose own are 0 there. Without gradients
            # in place, since logits are a call's largest tensor.
            fill = logits.masked_fill if logits.requires_grad else logits.masked_fill_
            logits = fill(padding.absent.to(logits.device).unsqueeze(-1), 0)
        result = TTTCausalLMOutput(
            loss=loss,
            logits=logits,
            cache=output.cache,
            hidden_states=output.hidden_states,
        )
        if return_dict is None:
            return_dict = self.config.return_dict
        return result if return_dict else result.to_tuple()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """No: this model has no cache of keys and values."""
        return False

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse transformers' continuous batching, also for ``generate_batch``.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "continuous batching pages keys and values, a TTT language model has states: give "
            "generate a batch that is padded on the left"
        )

    def _prefill(
        self,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        is_first_iteration: bool = True,
    ) -> TTTCausalLMOutput:
        """Read what ``generate`` is given, ``prefill_chunk_size`` tokens at a time.

        transformers' own needs a cache of keys and values to be there before.
        """
        size = generation_config.prefill_chunk_size
        if size is None:
            return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)
        if size < 1:
            raise ValueError(f"prefill_chunk_size must be at least 1, got {size}")
        inputs = self.prepare_inputs_for_generation(
            input_ids, is_first_iteration=is_first_iteration, **model_kwargs
        )
        if not inputs["use_cache"]:
            raise ValueError("prefill_chunk_size needs use_cache=True, got False")
        by_token = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
        given = {name: inputs[name] for name in by_token if inputs.get(name) is not None}
        length = given["inputs_embeds" if "inputs_embeds" in given else "input_ids"].shape[1]
        for start in range(0, length, size):
            for name, x in given.items():
                inputs[name] = x[:, -length:][:, start : start + size]
            output = self(**inputs, return_dict=True)
            inputs["cache"] = output.cache
        return output

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: TTTCache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        use_cache: bool | None = None,
        **kwargs: Any,  # transformers looks for this name, to see what forward takes
    ) -> dict[str, Any]:
        """The arguments of the next call while ``generate`` runs.

        Raises:
            TypeError: the cache is of another kind, such as one of keys and values.
            ValueError: the cache has seen all tokens that are given, it has another number of
                sequences, ``use_cache`` is False, or a prompt ends in padding.
        """
        if is_first_iteration and attention_mask is not None and not attention_mask[:, -1].all():
            rows = (attention_mask[:, -1] == 0).nonzero().flatten().tolist()
            raise ValueError(
                "generate requires prompts that are padded on the left, but attention_mask is 0 at"
                f" the last token of rows {rows}; set padding_side='left' on the tokenizer"
            )
        if cache is not None:
            check_cache(cache)
            if not use_cache:
                raise ValueError("generate continues from cache only with use_cache=True")
            if is_first_iteration:
                name = "input_ids" if inputs_embeds is None else "inputs_embeds"
                batch, given = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]
                if cache.batch not in (None, batch):
                    raise ValueError(
                        f"cache has {cache.batch} sequences and generate runs {batch}"
                        ", each num_beams or num_return_sequences times; repeat each as often by "
                        "cache.select"
                    )
                next_sequence_length = given - cache.length
                if next_sequence_length < 1:
                    raise ValueError(
                        f"{name} must begin with the {cache.length} tokens that cache "
                        f"has seen and have at least one more, got {given} tokens"
                    )
            else:
                attention_mask = None  # padding on the left was left out in the first iteration
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            cache=cache,
            use_cache=use_cache,
            **kwargs,
        )


def _kept(x: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The last tokens of x [B, T, D], or those of some places [n]."""
    if isinstance(logits_to_keep, Tensor):
        if logits_to_keep.ndim != 1:
            raise ValueError(
                f"logits_to_keep must be a number or places [n], got {list(logits_to_keep.shape)}"
            )
        return x[:, logits_to_keep]
    if logits_to_keep < 0:
        raise ValueError(f"logits_to_keep must be at least 0, got {logits_to_keep}")
    return x[:, -logits_to_keep:]


def _loss(
    logits: Tensor, labels: Tensor, padding: Padding | None, items: Tensor | int | None
) -> Tensor:
    """Cross-entropy of the next tokens, the mean of those with a label."""
    targets = _next_labels(labels, padding)
    reduction = "mean" if items is None else "sum"
    loss = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction=reduction
    )
    return loss if items is None else loss / items


def _further_labels(
    labels: Tensor, hidden: Tensor, mask: Tensor | None, boundaries: dict[str, Any]
) -> Tensor:
    """The labels [B, n] of the last tokens, without those of documents' first ones."""
    padding = None if mask is None else Padding.of(mask[:, -hidden.shape[1] :])
    begins = first_tokens(hidden, padding, boundaries)
    if begins is None:
        return labels
    if padding is not None:
        begins = take(begins, padding.places)
    return labels.masked_fill(begins[:, -labels.shape[1] :], _IGNORED)


def _next_labels(labels: Tensor, padding: Padding | None) -> Tensor:
    """The label of each token's next one in its row [B, T], padding left out."""
    if padding is not None:
        place = torch.arange(labels.shape[1], device=labels.device)
        behind = place >= padding.lengths.unsqueeze(1)
        labels = take(labels, padding.order).masked_fill(behind, _IGNORED)
    # The labels are moved rather than the last logits cut off, whose gradient would be a copy.
    targets = F.pad(labels[:, 1:], (0, 1), value=_IGNORED)
    return targets if padding is None else take(targets, padding.places)
