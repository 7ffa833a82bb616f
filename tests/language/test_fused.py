"""The switch ``fused`` of language models: the same numbers, and checkpoints that say nothing."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from language_models import MAMBA, small_config, small_model
from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt.layers import Linear, unfuse
from vision_ttt.ops._table import TABLE

WIDTHS = {"vocab_size": 48}  # multiples of 16, which the products serve
KINDS = {
    "linear": WIDTHS,
    "mlp mamba": {"ttt_layer_type": "mlp", **MAMBA, **WIDTHS},
    "untied": {"tie_word_embeddings": False, **WIDTHS},
}
TOKENS = torch.randint(0, 48, (2, 80), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=KINDS)
def models(request):
    """A model, and the same one fused."""
    options = KINDS[request.param]
    return small_model(**options), small_model(fused=True, **options)


@pytest.fixture
def products(monkeypatch):
    """The number of columns of each product that the op computes."""
    op, seen = TABLE["linear"], []
    backend = op.backends["cpu"]
    record = backend._replace(forward=lambda a: seen.append(len(a[1])) or backend.forward(a))
    monkeypatch.setitem(op.backends, "cpu", record)
    return seen


def outcome(model, **options):
    """Logits, the loss, and every parameter's gradient, by name."""
    model.zero_grad()
    output = model(TOKENS, labels=TOKENS, use_cache=False, **options)
    output.loss.backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters()}
    return {"logits": output.logits.detach(), "loss": output.loss.detach(), **gradients}


def assert_same(got, wanted, forward=FORWARD[torch.float32], gradient=GRADIENT[torch.float32]):
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        assert_close(got[name], x, forward if name in ("logits", "loss") else gradient, name)


def test_logits_loss_and_gradients(models, products):
    plain, fused = models
    wanted = outcome(plain.train())
    assert not products
    assert_same(outcome(fused.train()), wanted)
    assert products.count(48) >= 1  # the head, of all of its rows
    assert len(products) >= 2 * 4 + 1  # the blocks' wide projections
    assert_same(outcome(fused), wanted)  # again, of the same model


def test_float64_is_the_same_to_the_last_bit(models):
    plain, fused = (model.double().train() for model in models)
    wanted, got = outcome(plain), outcome(fused)
    assert all(torch.equal(got[name], x) for name, x in wanted.items())


@pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(models, reentrant, products):
    plain, fused = (model.train() for model in models)
    wanted = outcome(plain)
    fused.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(outcome(fused), wanted)
    assert products


def test_a_graph_may_be_used_twice(models):
    _, fused = models
    loss = fused.train()(TOKENS, labels=TOKENS, use_cache=False).loss
    loss.backward(retain_graph=True)
    once = {name: x.grad.clone() for name, x in fused.named_parameters()}
    loss.backward()
    for name, x in fused.named_parameters():
        assert_close(x.grad, 2 * once[name], 1e-6, name)


def test_autocast(models):
    found = []
    for model in models:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(TOKENS, labels=TOKENS, use_cache=False)
        output.loss.backward()
        found.append(output)
    assert found[0].logits.dtype == found[1].logits.dtype == torch.bfloat16
    assert_close(found[1].loss, found[0].loss, FORWARD[torch.bfloat16])


def test_one_graph(products):
    options = {"num_hidden_layers": 1, **MAMBA, **WIDTHS}
    plain, fused = small_model(**options), small_model(fused=True, **options)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    wanted, got = (model(TOKENS, labels=TOKENS, use_cache=False) for model in (plain, compiled))
    assert products
    assert_close(got.logits, wanted.logits, FORWARD[torch.float32])
    for output in (got, wanted):
        output.loss.backward()
    for (name, x), y in zip(plain.named_parameters(), fused.parameters(), strict=True):
        assert_close(y.grad, x.grad, GRADIENT[torch.float32], name)


def test_generation_prefill_and_decoding(models):
    wanted, got = (
        model.generate(TOKENS, max_new_tokens=5, do_sample=False, attention_mask=TOKENS >= 0)
        for model in models
    )
    assert torch.equal(got, wanted)


def test_transformers_trainer(tmp_path, products):
    model = small_model(fused=True, **WIDTHS)
    rows = [{"input_ids": row, "labels": row} for row in TOKENS.repeat(4, 1)]
    arguments = TrainingArguments(
        tmp_path,
        max_steps=6,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0]
    assert products


def test_checkpoints_say_nothing_of_it_and_go_both_ways(models, tmp_path):
    plain, fused = models
    wanted = plain(TOKENS).logits
    fused.save_pretrained(tmp_path / "fused")
    plain.save_pretrained(tmp_path / "plain")
    assert "fused" not in (tmp_path / "fused" / "config.json").read_text()
    bare = AutoModelForCausalLM.from_pretrained(tmp_path / "fused")
    assert not any(isinstance(module, Linear) for module in bare.modules())
    assert torch.equal(bare(TOKENS).logits, wanted)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", fused=True)
    assert isinstance(other.lm_head, Linear)
    assert_close(other(TOKENS).logits, wanted, FORWARD[torch.float32])
    tied = other.lm_head.weight is other.model.embed_tokens.weight
    assert tied == plain.config.tie_word_embeddings
    fused.load_state_dict(plain.state_dict())
    plain.load_state_dict(fused.state_dict())


def test_it_is_off_unless_asked_for_and_can_be_switched_off(models, products):
    plain, fused = models
    assert not plain.config.fused
    assert not any(isinstance(module, Linear) for module in plain.modules())
    unfuse(fused)
    assert torch.equal(fused(TOKENS).logits, plain(TOKENS).logits)
    assert not products
    with pytest.raises(TypeError, match="fused must be True or False, got 'yes'"):
        small_config(fused="yes")


def test_names_that_adapters_are_given():
    """Those of the guide, and of adapters that have been saved."""
    for options in KINDS.values():
        layers = small_model(**options).model.layers.named_modules()
        names = {name.rpartition(".")[2] for name, x in layers if isinstance(x, nn.Linear)}
        assert names == {"in_proj", "rate_proj", "out_proj", "fc1", "fc2"}


def test_every_module_is_called():
    """No part only holds parameters: hooks run, and adapters may take the place of any layer."""
    model, fired = small_model(fused=True, **MAMBA, **WIDTHS), set()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: fired.add(name))
    before = model(TOKENS).logits
    assert fired == {name for name, x in model.named_modules() if not isinstance(x, nn.ModuleList)}

    class LowRank(nn.Module):
        """A linear layer with an adapter, as LoRA's wrappers are."""

        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down, self.up = (
                nn.Parameter(torch.randn(4, size)) for size in (base.in_features, base.out_features)
            )

        def forward(self, x):
            return self.base(x) + x @ self.down.t() @ self.up

    for name in ("model.layers.0.ttt.out_proj", "model.layers.1.mlp.fc1", "lm_head"):
        plain = copy.deepcopy(model)
        plain.set_submodule(name, LowRank(plain.get_submodule(name)))
        wanted = copy.deepcopy(plain)
        unfuse(wanted)
        assert_close(plain(TOKENS).logits, wanted(TOKENS).logits, FORWARD[torch.float32])
        assert not torch.allclose(plain(TOKENS).logits, before, rtol=1e-2)
