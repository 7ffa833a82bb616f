"""Rows into which documents are packed give what the documents give one by one."""

from itertools import pairwise

import pytest
import torch
from transformers import DataCollatorWithFlattening

from language_models import MAMBA, small_model
from tolerances import assert_close

KINDS = {
    "linear": {},
    "mlp mamba": {"ttt_layer_type": "mlp", **MAMBA},
}
LENGTHS = [5, 1, 9, 3]  # of mini-batches of 4


@pytest.fixture(params=KINDS)
def model(request):
    return small_model(**KINDS[request.param])


def tokens(*shape):
    return torch.randint(0, 31, shape, generator=torch.Generator().manual_seed(1))


def positions(lengths, start=0):
    return torch.cat([torch.arange(length) + start for length in lengths])[None]


def numbers(lengths):
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None].int()


def ends(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


BOUNDARIES = {
    "positions": {"position_ids": positions(LENGTHS)},
    "positions from 2": {"position_ids": positions(LENGTHS, 2)},
    "numbers": {"seq_idx": numbers(LENGTHS)},
    "ends": {"cu_seq_lens_q": ends(LENGTHS), "max_length_q": 9},
    "numbers under positions of the row": {
        "position_ids": positions([18]),
        "seq_idx": numbers(LENGTHS),
    },
}


def outcome(model, embedded, documents, **options):
    """Hidden states, the summed loss, and all gradients, those of the tokens among them."""
    model.zero_grad()
    embedded = embedded.clone().requires_grad_()
    hidden, loss = [], 0
    for document in documents:
        x = embedded[:, document]
        output = model(
            inputs_embeds=x,
            labels=tokens(1, 18)[:, document],
            num_items_in_batch=1,
            output_hidden_states=True,
            **options,
        )
        hidden.append(torch.cat([*output.hidden_states, output.logits], -1))
        loss = loss + output.loss
    loss.backward()
    gradients = {name: x.grad for name, x in model.named_parameters()}
    return {
        "hidden": torch.cat(hidden, 1),
        "loss": loss,
        "tokens' gradient": embedded.grad,
        **gradients,
    }


@pytest.mark.parametrize("boundaries", BOUNDARIES)
def test_outputs_loss_and_gradients(model, boundaries):
    embedded = torch.randn(1, 18, 32, generator=torch.Generator().manual_seed(2))
    stops = ends(LENGTHS).tolist()
    spans = [slice(start, stop) for start, stop in pairwise(stops)]
    model.train()
    wanted = outcome(model, embedded, spans)
    got = outcome(model, embedded, [slice(None)], **BOUNDARIES[boundaries])
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        assert_close(got[name], x, 5e-5, name)


@pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(model, reentrant):
    ids, found = tokens(1, 18), []
    for _ in range(2):
        model.zero_grad()
        model.train()(ids, labels=ids, position_ids=positions(LENGTHS)).loss.backward()
        found.append([x.grad.clone() for x in model.parameters()])
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for x, wanted in zip(*reversed(found), strict=True):
        assert_close(x, wanted, 1e-6)


def test_documents_of_like_lengths_are_run_together(model):
    """The documents' tokens cost what they cost alone, with less than as much padding."""
    seen, lengths = [], [1, 40, 2, 33, 1, 3, 4, 64]
    model.model.layers[0].ttt.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    model(tokens(1, 148), position_ids=positions(lengths))
    assert {shape[:2] for shape in seen} == {(2, 1), (1, 2), (2, 4), (3, 64)}


def test_nothing_of_a_document_reaches_another(model):
    """Neither of one that is run together with it, and is longer."""
    embedded = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(2))
    found = []
    for value in (0.0, float("nan")):
        x = torch.cat([embedded[:, :5], torch.full((1, 7, 32), value)], 1).requires_grad_()
        logits = model(inputs_embeds=x, position_ids=positions([5, 7])).logits[:, :5]
        (gradient,) = torch.autograd.grad(logits.square().sum(), x)
        found.append(torch.cat([logits, gradient[:, :5]], -1))
    assert torch.equal(*found)


def padded(side, lengths):
    """The places of a row of 11 at which its documents' tokens are."""
    count = sum(lengths)
    between = torch.randperm(11, generator=torch.Generator().manual_seed(2))[:count].sort().values
    return {"left": torch.arange(11 - count, 11), "right": torch.arange(count)}.get(side, between)


@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_with_padding(model, side):
    """Several rows, one of padding only; then each goes on from its last document."""
    ids, more = tokens(3, 11), tokens(3, 3)
    mask, position_ids = torch.zeros_like(ids), torch.ones_like(ids)
    rows = [[3, 5, 1], [6], [0]]
    for row, lengths in enumerate(rows):
        places = padded(side, lengths)
        mask[row, places] = 1
        position_ids[row, places] = positions(lengths)[0]
    output = model(ids, mask, labels=ids, use_cache=True, position_ids=position_ids)
    rest = model(more, cache=output.cache).logits
    loss = 0
    for row, lengths in enumerate(rows):
        documents = ids[row][mask[row] == 1].split(lengths)
        for x, got in zip(
            documents, output.logits[row][mask[row] == 1].split(lengths), strict=True
        ):
            if len(x):
                alone = model(x[None], labels=x[None], num_items_in_batch=2 + 4 + 5)
                assert_close(got, alone.logits[0], 1e-5)
                loss += alone.loss
        last = torch.cat([documents[-1], more[row]])[None]
        assert_close(rest[row], model(last).logits[0, -3:], 1e-5)
    assert_close(output.loss, loss, 1e-5)


@pytest.mark.parametrize("use_cache", [False, True])
def test_padding_reaches_nothing(model, use_cache):
    """Neither that of a row without tokens."""
    mask = torch.tensor([[1] * 9 + [0] * 3, [0] * 12])
    position_ids = positions([4, 8]).expand(2, 12)
    embedded, found = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(2)), []
    for value in (0.0, float("nan")):
        x = torch.where(mask[..., None] == 1, embedded, value).requires_grad_()
        output = model(
            inputs_embeds=x, attention_mask=mask, position_ids=position_ids, use_cache=use_cache
        )
        found.append([output.logits, *torch.autograd.grad(output.logits.sum(), [x, *body(model)])])
        if use_cache:
            found[-1] += output.cache.tensors().values()
    for got, wanted in zip(*found, strict=True):
        assert torch.equal(got, wanted)


def body(model):
    """The parameters but the embeddings, which give way to inputs_embeds."""
    return [x for x in model.parameters() if x is not model.get_input_embeddings().weight]


def test_the_loss_of_the_last_tokens(model):
    ids, labels = tokens(1, 18), tokens(1, 18)
    labels[:, :9] = -100
    options = {"position_ids": positions(LENGTHS)}
    wanted = model(ids, labels=labels, **options).loss
    kept = model(ids, labels=ids[:, 8:], logits_to_keep=10, **options).loss
    assert_close(kept, wanted, 1e-6)


def test_a_collator_that_flattens(model):
    rows = [{"input_ids": x.tolist()} for x in tokens(1, 18)[0].split(LENGTHS)]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collator(rows)
    losses = [
        model(x[None], labels=x[None], num_items_in_batch=14).loss
        for x in tokens(1, 18)[0].split(LENGTHS)
    ]
    assert_close(model(**batch).loss, sum(losses), 1e-5)


@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_goes_on_with_the_last_document(model, use_cache):
    ids = tokens(1, 18)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "use_cache": use_cache}
    mask = torch.ones_like(ids)
    got = model.generate(ids, attention_mask=mask, position_ids=positions(LENGTHS), **options)
    alone = ids[:, -3:]
    wanted = model.generate(alone, attention_mask=torch.ones_like(alone), **options)
    assert torch.equal(got[:, 18:], wanted[:, 3:])


def test_wrong_boundaries(model):
    ids = tokens(2, 6)
    for name, value, kind, told in (
        ("position_ids", [[0, 1, 2, 0, 1, 2]], TypeError, "tensor of int32 or int64, got list"),
        ("position_ids", torch.zeros(2, 6), TypeError, "got torch.float32"),
        ("seq_idx", ids[:, :5], ValueError, r"shape \[2, 6\], got \[2, 5\]"),
        ("position_ids", ids[None], ValueError, r"shape \[2, 6\], got \[1, 2, 6\]"),
        ("cu_seq_lens_q", torch.tensor([0, 3, 6]), ValueError, r"from 0 to 12, .* got \[0, 3, 6\]"),
        ("cu_seq_lens_k", torch.tensor([0, 8, 5, 12]), ValueError, "rise from 0 to 12"),
        ("cu_seq_lens_q", torch.tensor([2, 12]), ValueError, "rise from 0 to 12"),
    ):
        with pytest.raises(kind, match=f"{name} must .*{told}"):
            model(ids, **{name: value})
    cache = model(ids, use_cache=True).cache
    again = torch.tensor([[6, 7, 8, 9, 10, 11], [6, 7, 8, 0, 1, 2]])
    with pytest.raises(
        ValueError, match="one document in each row, but further documents begin in position_ids"
    ):
        model(ids, cache=cache, position_ids=again)
