"""The runs of the TTT-layers paper: sizes, models, contexts and Table 1 as variants of recipes."""

import pytest
import torch

from vision_ttt import recipes
from vision_ttt.engine import ConfigError, TrainConfig
from vision_ttt.tasks.language.ablations import ABLATIONS
from vision_ttt.tasks.language.models import build_language_model, model_arguments

TOKENS = 2**19
SIZES = {
    "125m": (4800, 3e-3, 110_424_144),
    "350m": (13_500, 1.5e-3, 337_684_224),
    "760m": (29_000, 1.25e-3, 733_608_192),
    "1.3b": (50_000, 1e-3, 1_285_639_296),
}


def parameters(config: TrainConfig) -> int:
    context = config.data.context
    arguments = model_arguments(
        config.model.name, config.model.arguments, vocab_size=32_000, end=2, context=context
    )
    with torch.device("meta"):
        model = build_language_model(config.model.name, arguments)
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes_train_as_published(size: str) -> None:
    updates, rate, count = SIZES[size]
    config = recipes.load(f"pile+{size}")
    own = config.optimisation
    assert (own.updates, own.warmup, own.learning_rate) == (updates, updates / 10, rate)
    assert own.minimum_learning_rate == 1e-5
    assert (own.beta1, own.beta2, own.weight_decay, own.clip_norm) == (0.9, 0.95, 0.1, 1.0)
    assert own.inner_warmup == 0
    assert parameters(config) == count
    # The order of the variants is the recipe's own.
    deep = recipes.load(f"pile+{size}+mlp")
    assert deep.optimisation.inner_warmup == deep.optimisation.warmup == updates / 10
    assert deep.model == recipes.load(f"pile+mlp+{size}").model
    assert deep.run.output == f"runs/pile+{size}+mlp"
    runs = recipes.load_stages(f"books-finetune+{size}+32k")
    pretrain, finetune = (each.optimisation for each in runs.values())
    assert (pretrain.updates, finetune.updates) == (updates, updates / 5)
    assert pretrain == recipes.load(f"pile+llama+{size}").optimisation
    assert finetune.learning_rate == (1e-4 if size == "125m" else 1e-5)
    assert runs["pretrain"].model.arguments.get("rope_parameters") is None
    assert runs["finetune"].model.arguments["rope_parameters"]["rope_theta"] == 500_000
    assert runs["finetune"].data.context * finetune.batch_size == TOKENS


@pytest.mark.parametrize("context", [2**power for power in range(10, 16)])
def test_batches_have_the_same_tokens_at_every_context(context: int) -> None:
    config = recipes.load(f"pile+125m+{context // 1024}k")
    assert config.data.context == context
    assert config.optimisation.batch_size * context == TOKENS


@pytest.mark.parametrize(
    ("variants", "millions"),
    [
        ("125m+mlp+transformer", 114.4),
        ("125m+llama+rope-500k", 109.5),
        ("125m+mamba-130m", 115.1),
        ("350m+mamba", 352.8),
        ("matched-linear", 1330.5),
        ("mlp+matched-mlp", 1270.1),
        ("llama+matched-llama", 1026.9),
    ],
)
def test_contenders_are_built(variants: str, millions: float) -> None:
    assert parameters(recipes.load(f"pile+{variants}")) / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.parametrize("row", ABLATIONS)
def test_every_row_of_table_one_is_built(row: str) -> None:
    config = recipes.load(f"text+{row}")
    assert parameters(config) > 0
    assert recipes.load(f"pile+125m+{row}").model.arguments["hidden_size"] == 768
    if row == "mamba_backbone":
        plain = recipes.load("text").model.arguments
        assert {key: config.model.arguments[key] for key in plain} == plain


def test_unknown_variants_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown variant '7b' of ttt; known are mlp, "):
        recipes.load("pile+7b")
    with pytest.raises(ConfigError, match="variant 'mlp' of ttt; known are linear_attention, "):
        recipes.load("text+mlp")
