"""Heads that label sequences and tokens: what they compute, beside a computation by hand."""

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)

from language_models import MAMBA, small_config, small_model
from tolerances import assert_close
from vision_ttt.language import TTTForSequenceClassification, TTTForTokenClassification

KINDS = {
    "linear": {},
    "mlp mamba": {"ttt_layer_type": "mlp", **MAMBA},
}
HEADS = {
    TTTForSequenceClassification: AutoModelForSequenceClassification,
    TTTForTokenClassification: AutoModelForTokenClassification,
}
LENGTHS = [7, 2, 5]


def small_head(auto, **options):
    """A model in which every parameter matters, without dropout."""
    torch.manual_seed(0)
    config = small_config(num_labels=3, pad_token_id=0, classifier_dropout=0.0, **options)
    model = auto.from_config(config)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn_like(x) * 0.2)
    return model.eval()


def batch(side):
    """Rows of several lengths, with padding of 0, and their mask."""
    ids = torch.randint(1, 31, (3, 7), generator=torch.Generator().manual_seed(1))
    place = torch.arange(7).expand(3, 7)
    lengths = torch.tensor(LENGTHS)[:, None]
    mask = (place >= 7 - lengths if side == "left" else place < lengths).long()
    return ids * mask, mask


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: x.grad for name, x in model.named_parameters()}


def hidden(model, ids, mask):
    """The tokens behind the last block, of each row alone."""
    return [
        model.model(row[seen == 1][None]).last_hidden_state[0]
        for row, seen in zip(ids, mask, strict=True)
    ]


@pytest.fixture(params=KINDS)
def options(request):
    return KINDS[request.param]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_label_of_each_sequence(options, side):
    model = small_head(AutoModelForSequenceClassification, **options)
    assert type(model) is TTTForSequenceClassification
    ids, mask = batch(side)
    labels = torch.tensor([2, 0, 1])
    got = model(ids, attention_mask=mask, labels=labels)
    logits = torch.stack([x[-1] @ model.score.weight.T for x in hidden(model, ids, mask)])
    assert_close(got.logits, logits, 1e-5)
    loss = F.cross_entropy(logits, labels)
    assert_close(got.loss, loss, 1e-5)
    wanted, ours = gradients(model, loss), gradients(model, got.loss)
    for name, x in wanted.items():
        assert_close(ours[name], x, 5e-5, name)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_label_of_each_token(options, side):
    model = small_head(AutoModelForTokenClassification, **options)
    assert type(model) is TTTForTokenClassification
    ids, mask = batch(side)
    labels = (ids % 3).masked_fill(mask == 0, -100)
    got = model(ids, attention_mask=mask, labels=labels)
    tokens = torch.cat(hidden(model, ids, mask))
    logits = tokens @ model.score.weight.T + model.score.bias
    assert_close(got.logits[mask == 1], logits, 1e-5)
    loss = F.cross_entropy(logits, labels[mask == 1])
    assert_close(got.loss, loss, 1e-5)
    wanted, ours = gradients(model, loss), gradients(model, got.loss)
    for name, x in wanted.items():
        assert_close(ours[name], x, 5e-5, name)


def test_the_last_embedding():
    model = small_head(AutoModelForSequenceClassification)
    ids, mask = batch("left")
    x = model.get_input_embeddings()(ids)
    got = model(inputs_embeds=x, attention_mask=mask).logits
    assert_close(got, model(ids, attention_mask=mask).logits, 1e-6)
    with pytest.raises(ValueError, match="inputs_embeds must have their padding on the left"):
        model(inputs_embeds=x, attention_mask=mask.flip(1))


@pytest.mark.parametrize("auto", HEADS.values())
def test_saved_and_loaded(auto, tmp_path):
    """Also from a causal language model, and with other numbers of tokens."""
    model, (ids, mask) = small_head(auto), batch("right")
    model.save_pretrained(tmp_path / "own")
    loaded, report = auto.from_pretrained(tmp_path / "own", output_loading_info=True)
    assert not any(report.values()), report
    wanted = model(ids, mask).logits
    assert torch.equal(loaded(ids, mask).logits, wanted)
    loaded.resize_token_embeddings(40)
    assert loaded.config.vocab_size == 40
    assert torch.equal(loaded(ids, mask).logits, wanted)
    body = small_model()
    body.save_pretrained(tmp_path / "body")
    head, report = auto.from_pretrained(tmp_path / "body", num_labels=3, output_loading_info=True)
    assert {name.partition(".")[0] for name in report["missing_keys"]} == {"score"}
    assert head.score.out_features == 3
    x = body.model(ids).last_hidden_state
    assert torch.equal(head.model(ids).last_hidden_state, x)


@pytest.mark.parametrize("auto", HEADS.values())
def test_gradient_checkpointing(auto):
    model, (ids, mask) = small_head(auto).train(), batch("left")
    labels = ids[:, 0] % 3 if auto is AutoModelForSequenceClassification else ids % 3
    wanted = gradients(model, model(ids, mask, labels=labels).loss)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ours = gradients(model, model(ids, mask, labels=labels).loss)
    for name, x in wanted.items():
        assert_close(ours[name], x, 1e-6, name)


@pytest.mark.parametrize("auto", HEADS.values())
def test_trainer(auto, tmp_path):
    """The loss of accumulated batches is their mean; predictions are logits alone."""
    model, ids = small_head(auto), batch("left")[0][:1].repeat(4, 1)
    several = auto is AutoModelForTokenClassification
    rows = [{"input_ids": x, "labels": x % 3 if several else int(x[0] % 3)} for x in ids]
    labels = ids % 3 if several else ids[:, 0] % 3
    wanted = model(ids, labels=labels).loss
    arguments = TrainingArguments(
        tmp_path,
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(wanted.item(), rel=1e-3)
    assert trainer.predict(rows).predictions.shape == ((4, 7, 3) if several else (4, 3))
