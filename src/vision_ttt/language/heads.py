"""TTT language models that label sequences or tokens, by transformers' generic heads."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from vision_ttt.language.model import TTTPreTrainedModel


class TTTForSequenceClassification(GenericForSequenceClassification, TTTPreTrainedModel):
    """A linear head on a row's last token: token numbers [B, T] → logits [B, num_labels].

    The last token is the last of ``input_ids`` that is not ``config.pad_token_id``, on whichever
    side padding stands. Batches of several rows require that number.
    """

    accepts_loss_kwargs = False  # for Trainer: the loss is the mean of each batch

    @functools.wraps(GenericForSequenceClassification.forward)
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if input_ids is None and attention_mask is not None and not attention_mask[:, -1].all():
            raise ValueError(
                "inputs_embeds must have their padding on the left, got an attention_mask with 0 "
                "at the end: the last token is found by input_ids"
            )
        return super().forward(input_ids, attention_mask, *args, **kwargs)


class TTTForTokenClassification(GenericForTokenClassification, TTTPreTrainedModel):
    """Dropout and a linear head on every token: token numbers [B, T] → logits [B, T, num_labels].

    Dropout is ``config.classifier_dropout``, by default 0.1. Labels of -100 are left out of the
    loss.
    """

    accepts_loss_kwargs = False
