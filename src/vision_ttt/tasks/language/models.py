"""Causal language models of transformers, ours among them, by their model type."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vision_ttt.engine.config import ConfigError
from vision_ttt.errors import reason_of, suggestions
from vision_ttt.models.weight_decay import undecayed_parameters
from vision_ttt.tasks.language.code_refusal import code_refused

OWN = "ttt"
"""The model type of `vision_ttt.language`."""

_NOT_ARGUMENTS = {"self", "args", "kwargs", "model_type", "attribute_map"}
"""Names that a config class may declare beside its keys."""

_BY_TOKENIZER = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")


def build_language_model(name: str, arguments: Mapping[str, Any]) -> PreTrainedModel:
    """Build a causal language model, randomly initialised.

    Args:
        name: transformers' model type, e.g. "ttt", "llama", "mamba".
        arguments: keys of its config.

    Raises:
        ConfigError: there is no such model, an argument is none of its config's, or its value is
            not accepted.
    """
    config_class = _config_class(name)
    accepted = config_keys(name)
    for key in arguments:
        if key not in accepted:
            raise ConfigError(f"model {name} has no argument {key!r}; {suggestions(key, accepted)}")
    try:
        with code_refused():
            model = AutoModelForCausalLM.from_config(
                config_class(**arguments), trust_remote_code=False
            )
    # Configs and constructors of transformers' many models raise anything.
    except Exception as error:
        raise ConfigError(
            f"model {name} cannot be built with {dict(arguments)}: {reason_of(error)}"
        ) from error
    # By this name timm's optimisers ask for it; models of transformers do not have it.
    model.no_weight_decay = functools.partial(undecayed, model)
    return model


def undecayed(model: PreTrainedModel) -> set[str]:
    """Names of the matrices without weight decay: inner learners' states, Mamba's log(-A)."""
    rates = {name for name, _ in model.named_parameters() if name.endswith(".A_log")}
    return undecayed_parameters(model) | rates


def config_keys(name: str) -> set[str]:
    """Return the keys that a model type's config declares, without those that every config has.

    Raises:
        ConfigError: there is no such model.
    """
    config_class = _config_class(name)
    declared = {
        key
        for owner in config_class.__mro__[: config_class.__mro__.index(PreTrainedConfig)]
        for key in inspect.get_annotations(owner)
    }
    common = set(inspect.signature(PreTrainedConfig).parameters)
    own = set(inspect.signature(config_class).parameters) - common
    keys = declared | own | set(config_class.attribute_map)
    return {key for key in keys if not key.startswith("_")} - _NOT_ARGUMENTS


def model_arguments(
    name: str, own: Mapping[str, Any], *, vocab_size: int, end: int, context: int
) -> dict[str, Any]:
    """Return a config's keys: what the tokenizer and the context decide, and a run's own.

    Raises:
        ConfigError: the run's own hold what the tokenizer decides.
    """
    for key in own:
        if key in _BY_TOKENIZER:
            raise ConfigError(f"model.arguments may not hold {key}; the tokenizer gives it")
    decided = {
        "vocab_size": vocab_size,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": None,
        "max_position_embeddings": context,
    }
    accepted = config_keys(name)
    return {key: value for key, value in decided.items() if key in accepted} | dict(own)


def _config_class(name: str) -> type[PreTrainedConfig]:
    if name == OWN:
        import vision_ttt.language  # noqa: F401  registers it with transformers

        return CONFIG_MAPPING[name]
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        known = {OWN, *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
        raise ConfigError(
            f"unknown language model {name!r}, which must be a model type of transformers;"
            f" {suggestions(name, known)}"
        )
    return CONFIG_MAPPING[name]
