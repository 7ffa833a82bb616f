"""TTT language models with a head: loss and generation."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin

from vision_ttt.language.cache import TTTCache
from vision_ttt.language.configuration import TTTConfig
from vision_ttt.language.model import TTTModel, TTTPreTrainedModel
from vision_ttt.language.outputs import TTTCausalLMOutput
from vision_ttt.layers.linear import fuse_linear

_IGNORED = -100
"""The label of what is not to be predicted, transformers' and PyTorch's."""


class TTTForCausalLM(TTTPreTrainedModel, GenerationMixin):
    """A causal language model of TTT layers (TTT, Sec. 3): token numbers [B, T] → logits [B, T, V].

    ``generate`` is transformers': greedy, sampling and beam search, of batches with padding on the
    left, and with a streamer. It goes on from ``cache_params`` where ``input_ids`` are all tokens
    of the sequences, those that the cache has seen first.

    Args:
        config: sizes and options.
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    accepts_loss_kwargs = True  # for Trainer: forward has num_items_in_batch

    def __init__(self, config: TTTConfig) -> None:
        super().__init__(config)
        self.model = TTTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.fused:
            fuse_linear(self)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache_params: TTTCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
    ) -> TTTCausalLMOutput | tuple[Any, ...]:
        """Logits of the next tokens, and the loss if labels are given.

        Args beyond :meth:`TTTModel.forward`'s:
            labels: token numbers [B, T], as a rule ``input_ids``: the logits of a token are
                compared with the label of the next one. Those of -100, and those that padding would
                predict, are left out. The loss is computed in float32.
            logits_to_keep: return the logits of this many last tokens only; 0 for all.
            num_items_in_batch: divide the summed loss by it. None: by the number of labels.

        Raises:
            ValueError: as there, or labels do not go with the logits' shape.
        """
        output = self.model(
            input_ids,
            attention_mask=attention_mask,
            cache_params=cache_params,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        x = output.last_hidden_state
        logits = self.lm_head(x[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            if labels.shape != logits.shape[:2]:
                raise ValueError(
                    f"labels must have the logits' shape {list(logits.shape[:2])}, got "
                    f"{list(labels.shape)}; logits_to_keep is {logits_to_keep}"
                )
            loss = _loss(logits, labels, attention_mask, num_items_in_batch)
        result = TTTCausalLMOutput(
            loss=loss,
            logits=logits,
            cache_params=output.cache_params,
            hidden_states=output.hidden_states,
        )
        if return_dict is None:
            return_dict = self.config.return_dict
        return result if return_dict else result.to_tuple()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """No: a cache of keys and values is none of this model's."""
        return False

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache_params: TTTCache | None = None,
        attention_mask: Tensor | None = None,
        is_first_iteration: bool | None = False,
        use_cache: bool | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        """The arguments of the next call while ``generate`` runs.

        Raises:
            ValueError: the cache has seen all tokens that are given, or ``use_cache`` is False.
        """
        if cache_params is not None:
            if not use_cache:
                raise ValueError("generate goes on from cache_params with use_cache=True only")
            if is_first_iteration:
                next_sequence_length = input_ids.shape[1] - cache_params.length
                if next_sequence_length < 1:
                    raise ValueError(
                        f"input_ids must begin with the {cache_params.length} tokens that "
                        f"cache_params has seen and go on, got {input_ids.shape[1]} tokens"
                    )
            else:
                attention_mask = None  # padding on the left was left out in the first iteration
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            attention_mask=attention_mask,
            is_first_iteration=is_first_iteration,
            cache_params=cache_params,
            use_cache=use_cache,
            **others,
        )


def _loss(
    logits: Tensor, labels: Tensor, mask: Tensor | None, items: Tensor | int | None
) -> Tensor:
    """Cross-entropy of the next tokens, the mean of those with a label."""
    # The labels are moved rather than the last logits cut off, whose gradient would be a copy.
    targets = F.pad(labels[:, 1:], (0, 1), value=_IGNORED)
    if mask is not None:
        targets = targets.masked_fill(mask[:, -labels.shape[1] :] == 0, _IGNORED)
    reduction = "mean" if items is None else "sum"
    loss = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction=reduction
    )
    return loss if items is None else loss / items
