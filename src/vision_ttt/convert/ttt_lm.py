"""The release of the TTT language models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vision_ttt.convert.family import ConversionError, Family

_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"

_BLOCK = {
    "conv_norm": "conv.norm",
    "conv": "conv.conv",
    "ttt.conv_q": "seq_modeling_block.conv_q",
    "ttt.conv_k": "seq_modeling_block.conv_k",
    "ttt.merge": "seq_modeling_block.post_norm",
    "ttt.out_proj": "seq_modeling_block.o_proj",
    "mlp.fc2": "mlp.down_proj",
}
"""A block's module → the release's."""

_TTT = {
    "rate_proj.weight": "learnable_ttt_lr_weight",
    "rate_proj.bias": "learnable_ttt_lr_bias",
    "learner.position_offset": "learnable_token_idx",
    "learner.norm_weight": "ttt_norm_weight",
    "learner.norm_bias": "ttt_norm_bias",
    "learner.w0": "W1",  # TTT-Linear's
    "learner.b0": "b1",
    "learner.w1": "W1",  # TTT-MLP's
    "learner.b1": "b1",
    "learner.w2": "W2",
    "learner.b2": "b2",
}
"""A TTT layer's tensor → the release's."""


def _names(key: str, projections: tuple[str, ...]) -> str | tuple[str, ...]:
    block = re.fullmatch(r"(model\.layers\.\d+)\.(.+)", key)
    if block is None:
        return key
    prefix, part = block.groups()
    if part == "mlp.fc1.weight":
        return f"{prefix}.mlp.gate_proj.weight", f"{prefix}.mlp.up_proj.weight"
    if part == "ttt.in_proj.weight":
        return tuple(f"{prefix}.seq_modeling_block.{name}.weight" for name in projections)
    if (own := _TTT.get(part.removeprefix("ttt."))) is not None:
        return f"{prefix}.seq_modeling_block.{own}"
    module, _, leaf = part.rpartition(".")
    return f"{prefix}.{_BLOCK.get(module, module)}.{leaf}"


def _with_head(released: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The weights with the head that is tied to the embeddings, which files may leave out."""
    embeddings = released.get(_EMBEDDINGS)
    if embeddings is None:
        return released
    head = released.get(_HEAD, embeddings)
    if head is not embeddings and not torch.equal(head, embeddings):
        raise ConversionError(
            f"{_HEAD} is not {_EMBEDDINGS}, as it is in a model with tie_word_embeddings=True"
        )
    return {**released, _HEAD: head}


def _fitting(model: Any) -> Family:
    """The family with the names of the model's options."""
    config = model.config
    projections = ["q_proj"] if config.share_qk else ["k_proj", "q_proj"]
    projections += ["v_proj", *(["g_proj"] if config.use_gate else [])]
    names = partial(_names, projections=tuple(projections))
    family = TTT_LM._replace(released_name=names)
    return family._replace(prepared=_with_head) if config.tie_word_embeddings else family


TTT_LM = Family(
    "TTT-LM",
    "vision_ttt.language.causal_lm.TTTForCausalLM",
    frozenset({_EMBEDDINGS, "model.layers.0.seq_modeling_block.learnable_token_idx"}),
    partial(_names, projections=("k_proj", "q_proj", "v_proj")),
    fitting=_fitting,
)
