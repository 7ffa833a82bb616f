"""The configuration: released keys, published sizes, and what is refused."""

import pytest
import torch
from transformers import AutoConfig

from language_models import read
from vision_ttt.language import TTTConfig, TTTForCausalLM

LINEAR = {
    "transformer": (110_276_688, 337_291_008, 733_018_368, 1_284_852_864),
    "mamba": (110_424_144, 337_684_224, 733_608_192, 1_285_639_296),
}
MLP = {  # the smallest and the largest
    "transformer": (114_442_320, 1_307_069_568),
    "mamba": (114_589_776, 1_307_856_000),
}


def count(size, layer, backbone):
    config = TTTConfig.of_size(size, layer=layer, backbone=backbone)
    with torch.device("meta"):
        model = TTTForCausalLM(config)
    return config, sum(x.numel() for x in model.parameters())


@pytest.mark.parametrize("backbone", LINEAR)
def test_parameters_of_the_published_sizes(backbone):
    deep = {}
    for size, wanted in zip(("125m", "350m", "760m", "1.3b"), LINEAR[backbone], strict=True):
        assert count(size, "linear", backbone)[1] == wanted, size
        config, deep[size] = count(size, "mlp", backbone)
        models = config.num_attention_heads * config.num_hidden_layers
        d = config.hidden_size // config.num_attention_heads
        assert deep[size] == wanted + models * (7 * d**2 + 4 * d), size
    assert (deep["125m"], deep["1.3b"]) == MLP[backbone]


def test_the_keys_of_a_released_config():
    _, keys, _ = read("ttt_lm_mlp_mamba")
    given = {"architectures": ["TTTForCausalLM"], "torch_dtype": "float32", "top_k": 50}
    released = {**keys, **given, "_commit_hash": "0"}
    config = TTTConfig(**released)
    assert {key: getattr(config, key) for key in keys} == keys
    assert config.dtype == torch.float32


def test_a_saved_configuration(tmp_path):
    config = TTTConfig.of_size("350m", layer="mlp", backbone="mamba", vocab_size=100)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is TTTConfig
    assert loaded.to_dict() == {**config.to_dict(), "_name_or_path": loaded._name_or_path}
    assert (loaded.ttt_base_lr, loaded.vocab_size, loaded.pre_conv) == (0.1, 100, True)


@pytest.mark.parametrize(
    ("wrong", "kind", "told"),
    [
        ({"hidden_size": 100}, ValueError, "multiple of twice num_attention_heads, got 100 and 32"),
        ({"hidden_size": 96}, ValueError, "got 96 and 32"),
        ({"mini_batch_size": 0}, ValueError, "mini_batch_size must be at least 1, got 0"),
        ({"vocab_size": 1.5}, TypeError, "vocab_size must be a whole number, got 1.5"),
        ({"use_gate": "yes"}, TypeError, "use_gate must be True or False, got 'yes'"),
        ({"rms_norm_eps": 0.0}, ValueError, "rms_norm_eps must be positive, got 0"),
        ({"ttt_base_lr": "1"}, TypeError, "ttt_base_lr must be a number, got '1'"),
        ({"ttt_layer_type": "conv"}, ValueError, "must be 'linear' or 'mlp' or .*, got 'conv'"),
        ({"hidden_act": "gelu"}, ValueError, "hidden_act must be 'silu', got 'gelu'"),
        ({"pretraining_tp": 2}, ValueError, "pretraining_tp must be 1, got 2"),
        ({"hiden_size": 64}, ValueError, "no hiden_size; nearest: hidden_size"),
        ({"custom": 3}, ValueError, "TTTConfig has no custom; accepted: "),
        ({"learnable_w0": 0}, TypeError, "learnable_w0 must be True or False, got 0"),
        ({"learnable_w0": False, "ttt_layer_type": "mlp"}, ValueError, "at 0 an MLP has no"),
        ({"ttt_layer_type": "linear_attention"}, ValueError, "must be False with linear_attention"),
    ],
)
def test_wrong_values(wrong, kind, told):
    with pytest.raises(kind, match=told):
        TTTConfig(**wrong)


def test_no_code_of_a_hub(tmp_path):
    """TRL reads ``auto_map`` of every configuration; it is saved only where there is one."""
    config = TTTConfig()
    assert config.auto_map == {}
    assert config.auto_map is not TTTConfig().auto_map
    assert "auto_map" not in config.to_dict()
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).auto_map == {}
    config.auto_map["AutoModel"] = "module.Class"
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).auto_map == {"AutoModel": "module.Class"}


def test_base_rates_are_the_papers(tmp_path):
    assert TTTConfig().ttt_base_lr == 1.0
    assert TTTConfig(ttt_layer_type="mlp").ttt_base_lr == 0.1
    config = TTTConfig(ttt_layer_type="mlp", ttt_base_lr=1.0)
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).ttt_base_lr == 1.0


def test_keys_of_transformers_are_no_misspelt_ones():
    assert TTTConfig(tie_encoder_decoder=False).tie_encoder_decoder is False


def test_wrong_names_of_sizes():
    with pytest.raises(ValueError, match=r"size must be one of 125m, .*, got '7b'"):
        TTTConfig.of_size("7b")
    with pytest.raises(ValueError, match=r"layer must be one of linear, mlp, got 'conv'"):
        TTTConfig.of_size("125m", layer="conv")
    with pytest.raises(ValueError, match=r"backbone must be one of transformer, mamba, got 'x'"):
        TTTConfig.of_size("125m", backbone="x")
    with pytest.raises(TypeError, match="no vocab"):
        TTTConfig.of_size("125m", vocab=3)
