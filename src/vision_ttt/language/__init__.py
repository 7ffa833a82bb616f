"""TTT language models for transformers.

Importing this package registers them with transformers' Auto classes.

Example:
    >>> model = TTTForCausalLM(TTTConfig.of_size("125m", layer="linear", backbone="mamba"))
    >>> output = model(input_ids, labels=input_ids)  # loss, logits [B, T, V]
    >>> tokens = model.generate(input_ids, max_new_tokens=20)
"""

from vision_ttt.extras import require

require("lm", "vision_ttt.language")

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from vision_ttt.language.block import TTTBlock, TTTBlockState
from vision_ttt.language.cache import TTTCache
from vision_ttt.language.causal_lm import TTTForCausalLM
from vision_ttt.language.configuration import TTTConfig
from vision_ttt.language.heads import TTTForSequenceClassification, TTTForTokenClassification
from vision_ttt.language.model import TTTModel
from vision_ttt.language.outputs import TTTCausalLMOutput, TTTModelOutput

AutoConfig.register(TTTConfig.model_type, TTTConfig)
AutoModel.register(TTTConfig, TTTModel)
AutoModelForCausalLM.register(TTTConfig, TTTForCausalLM)
AutoModelForSequenceClassification.register(TTTConfig, TTTForSequenceClassification)
AutoModelForTokenClassification.register(TTTConfig, TTTForTokenClassification)

__all__ = [
    "TTTConfig",
    "TTTModel",
    "TTTForCausalLM",
    "TTTForSequenceClassification",
    "TTTForTokenClassification",
    "TTTBlock",
    "TTTBlockState",
    "TTTCache",
    "TTTModelOutput",
    "TTTCausalLMOutput",
]
