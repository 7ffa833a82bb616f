"""Released checkpoints of TTT-LM under our names. What they compute is in test_goldens."""

import pytest
import torch

from language_models import GOLDENS, read, weights
from vision_ttt import convert
from vision_ttt.language import TTTConfig, TTTForCausalLM
from vision_ttt.models.vit3 import ViT3


def released(name, **options):
    tensors, keys, _ = read(name)
    with torch.device("meta"):
        model = TTTForCausalLM(TTTConfig(**{**keys, **options}))
    return weights(tensors), model


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("tied", [True, False])
def test_every_number_is_used_once(name, tied):
    weights, model = released(name, tie_word_embeddings=tied)
    numbered, total = {}, 0
    for key, x in weights.items():
        numbered[key] = torch.arange(total, total + x.numel(), dtype=torch.float64).view_as(x)
        total += x.numel()
    if tied:
        numbered["lm_head.weight"] = numbered["model.embed_tokens.weight"]
    converted = convert.remap(numbered, model)
    shapes = {key: x.shape for key, x in model.state_dict().items()}
    assert {key: x.shape for key, x in converted.items()} == shapes
    used = torch.cat([x.flatten() for x in converted.values()]).sort().values
    wanted = torch.cat([x.flatten() for x in numbered.values()]).sort().values
    assert torch.equal(used, wanted)


def test_a_tied_head():
    weights, model = released("ttt_lm_linear_mamba")
    embeddings = weights["model.embed_tokens.weight"]
    del weights["lm_head.weight"]
    head = convert.remap(weights, model)["lm_head.weight"]
    assert head.data_ptr() == embeddings.data_ptr()
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = embeddings + 1
    with pytest.raises(ValueError, match=r"lm_head.weight is not model.embed_tokens.weight"):
        convert.remap(weights, model)
    _, untied = released("ttt_lm_linear_mamba", tie_word_embeddings=False)
    assert torch.equal(convert.remap(weights, untied)["lm_head.weight"], weights["lm_head.weight"])
    del weights["lm_head.weight"]
    with pytest.raises(ValueError, match=r"missing lm_head\.weight; unexpected none"):
        convert.remap(weights, untied)


def test_what_does_not_fit_is_named_as_in_the_release():
    weights, _ = released("ttt_lm_linear_mamba")
    _, other = released("ttt_lm_linear_transformer")
    layer = "model.layers.0.seq_modeling_block"
    with pytest.raises(ValueError, match="missing") as error:
        convert.remap(weights, other)
    told = str(error.value)
    assert f"missing {layer}.k_proj.weight, model.layers.1." in told
    assert f"{layer}.conv_k.weight" in told.partition("; unexpected ")[2]
    weights, model = released("ttt_lm_linear_mamba", mini_batch_size=8)
    with pytest.raises(ValueError, match=rf"{layer}\.learnable_token_idx \[16\] for \[1, 8\]"):
        convert.remap(weights, model)


def test_other_families():
    weights, model = released("ttt_lm_linear_mamba")
    vit3 = ViT3(32, 4, num_classes=2, embed_dim=24, depth=1, num_heads=1)
    with pytest.raises(ValueError, match="weights of TTT-LM, and ViT3 takes those of ViT³"):
        convert.remap(weights, vit3)
    with pytest.raises(ValueError, match="missing"):
        convert.remap(vit3.state_dict(), model)
    with pytest.raises(ValueError, match=r"no release is known for Linear; .*, TTTForCausalLM"):
        convert.remap(weights, torch.nn.Linear(2, 2))
