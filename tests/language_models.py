"""What the tests of the language models share: goldens, and small models."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from vision_ttt import convert
from vision_ttt.language import TTTConfig, TTTForCausalLM

GOLDEN = Path(__file__).parent / "golden"
GOLDENS = [
    f"ttt_lm_{layer}_{backbone}"
    for layer in ("linear", "mlp")
    for backbone in ("transformer", "mamba")
]


def read(name):
    """The tensors of a golden, the keys of its config.json and its tolerances."""
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    description = json.loads((GOLDEN / f"{name}.json").read_text())
    return tensors, description["config"]["TTTConfig"], description["tolerance"]


def weights(tensors, prefix="weights."):
    return {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}


def released_model(name, **options):
    """The model with the released weights of a golden, its tensors and its tolerances."""
    tensors, keys, tolerance = read(name)
    model = TTTForCausalLM(TTTConfig(**keys, **options))
    model.load_state_dict(convert.remap(weights(tensors), model))
    return model.eval(), tensors, tolerance


def small_config(**options):
    sizes = {
        "vocab_size": 31,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "mini_batch_size": 4,
        "eos_token_id": None,
    }
    return TTTConfig(**{**sizes, **options})


MAMBA = {"use_gate": True, "share_qk": True, "pre_conv": True}


def small_model(**options):
    """A small model in which every parameter matters."""
    torch.manual_seed(0)
    model = TTTForCausalLM(small_config(**options))
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn_like(x) * 0.2)
    return model.eval()
