"""The models: parts and padded rows of a batch give what the whole and the rows alone give."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache

from language_models import MAMBA, small_config, small_model
from tolerances import FORWARD, assert_close
from vision_ttt.language import TTTCache, TTTForCausalLM, TTTModel

KINDS = {
    "linear": {},
    "mlp mamba": {"ttt_layer_type": "mlp", **MAMBA},
}


@pytest.fixture(params=KINDS)
def model(request):
    return small_model(**KINDS[request.param])


def tokens(*shape):
    return torch.randint(0, 31, shape, generator=torch.Generator().manual_seed(1))


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {key: x.grad for key, x in model.named_parameters()}


@pytest.mark.parametrize("cuts", [[1], [3, 4, 9], [8], [2, 13]])
def test_parts_equal_the_whole(model, cuts):
    ids = tokens(2, 14)
    wanted = model(ids).logits
    cache, logits = None, []
    for start, stop in zip([0, *cuts], [*cuts, 14], strict=True):
        output = model(ids[:, start:stop], cache=cache, use_cache=True)
        cache = output.cache
        logits.append(output.logits)
        assert cache.get_seq_length() == stop
    assert_close(torch.cat(logits, 1), wanted, FORWARD[torch.float32])


def test_a_cache_is_not_changed_and_can_be_saved(model):
    ids = tokens(2, 9)
    cache = model(ids[:, :6], use_cache=True).cache
    before = cache.tensors()
    first = model(ids[:, 6:], cache=cache, use_cache=True).logits
    assert cache.length == 6
    assert all(torch.equal(x, before[key]) for key, x in cache.tensors().items())
    loaded = TTTCache.from_tensors(cache.tensors(), cache.length)
    assert torch.equal(model(ids[:, 6:], cache=loaded).logits, first)
    swapped = cache.select([1, 0]).detach().to(torch.float64).to(torch.float32)
    assert_close(model(ids[[1, 0], 6:], cache=swapped).logits, first[[1, 0]], 1e-6)
    cache.reset()
    again = model(ids, cache=cache).logits
    assert torch.equal(again, model(ids).logits)
    with pytest.raises(ValueError, match=r"blocks are missing: there are \[1\]"):
        TTTCache.from_tensors({k: x for k, x in before.items() if k.startswith("1.")}, 6)


def test_training_goes_on_from_a_detached_cache(model):
    """Truncated backpropagation."""
    ids = tokens(2, 12)
    model.train()
    assert model(ids).cache is None
    cache = model(ids[:, :7], use_cache=True).cache.detach()
    output = model(ids[:, 7:], labels=ids[:, 7:], cache=cache)
    assert output.cache is None
    for key, x in gradients(model, output.loss).items():
        initial = key.rpartition(".")[2] in model.model.layers[0].ttt.learner.state_names
        assert x is None if initial else torch.isfinite(x).all(), key


LENGTHS = [11, 6, 11, 1, 8, 6]


def padded(ids, side):
    mask = torch.zeros_like(ids)
    places = torch.randperm(11, generator=torch.Generator().manual_seed(2))
    for row, length in enumerate(LENGTHS):
        spans = {"left": slice(11 - length, None), "right": slice(length)}
        mask[row, spans.get(side, places[:length])] = 1
    return mask


@pytest.mark.parametrize("side", ["left", "right", "between"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_a_padded_batch_gives_what_each_row_gives(model, side, use_cache):
    ids, more = tokens(6, 11), tokens(6, 3)
    mask = padded(ids, side)
    output = model(ids, attention_mask=mask, use_cache=use_cache, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    if use_cache:
        step = model(more[:, :1], cache=output.cache, use_cache=True)
        last = model(more[:, 1:], torch.ones(6, 14), step.cache).logits
    for row in range(6):
        alone = ids[row, mask[row] == 1][None]
        wanted = model(torch.cat([alone, more[row][None]], 1)).logits[0]
        length = alone.shape[1]
        assert_close(output.logits[row, mask[row] == 1], wanted[:length], 1e-5)
        if use_cache:
            assert_close(step.logits[row], wanted[length : length + 1], 1e-5)
            assert_close(last[row], wanted[length + 1 :], 1e-5)


def test_padding_after_a_cache(model):
    """Of rows that are at one place or at several; a row without new tokens stays where it is."""
    ids, more, last = tokens(3, 6), tokens(3, 7), tokens(3, 2)
    for mask in (torch.ones(3, 6), torch.tensor([[1] * 6, [0] * 2 + [1] * 4, [1] * 5 + [0]])):
        new = torch.tensor([[1] * 7, [0] * 7, [1, 1, 0, 0, 0, 1, 1]])
        cache = model(ids, mask, use_cache=True).cache
        second = model(more, torch.cat([mask, new], 1), cache, use_cache=True)
        third = model(last, cache=second.cache).logits
        for row in range(3):
            read = [ids[row][mask[row] == 1], more[row][new[row] == 1], last[row]]
            wanted = model(torch.cat(read)[None]).logits[0, len(read[0]) :]
            got = torch.cat([second.logits[row][new[row] == 1], third[row]])
            assert_close(got, wanted, 1e-5)


@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_the_loss_of_a_padded_batch(side):
    model, ids = small_model(), tokens(6, 11)
    mask = padded(ids, side)
    got = model(ids, attention_mask=mask, labels=ids).loss
    losses = []
    for row, length in enumerate(LENGTHS):
        if length > 1:
            alone = ids[row, mask[row] == 1][None]
            losses.append(model(alone, labels=alone).loss * (length - 1))
    assert_close(got, sum(losses) / sum(n - 1 for n in LENGTHS), 1e-5)
    ours, wanted = gradients(model, got), gradients(model, sum(losses) / 37)
    for key, x in wanted.items():
        assert_close(ours[key], x, 5e-5, key)


def test_ignored_labels_and_the_number_of_items():
    model, ids = small_model(), tokens(2, 8)
    labels = ids.clone()
    labels[:, :5] = -100
    logits = model(ids).logits[:, 4:-1]
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 5:].flatten())
    assert_close(model(ids, labels=labels).loss, wanted, 1e-6)
    assert_close(model(ids, labels=labels, num_items_in_batch=12).loss, wanted / 2, 1e-6)
    loss, logits = model(ids, labels=labels, use_cache=False, return_dict=False)
    assert loss.ndim == 0
    assert logits.shape == (2, 8, 31)


def test_logits_to_keep(model):
    ids = tokens(2, 8)
    wanted = model(ids).logits
    assert_close(model(ids, logits_to_keep=3).logits, wanted[:, -3:], 1e-6)
    places = torch.tensor([5, 1])
    assert_close(model(ids, logits_to_keep=places).logits, wanted[:, [5, 1]], 1e-6)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    assert torch.equal(embedded, wanted)


def test_wrong_calls(model):
    ids = tokens(2, 5)
    cache = model(ids, use_cache=True).cache

    def refused(told, *args, **options):
        with pytest.raises(ValueError, match=told):
            model(*args, **options)

    refused("one of input_ids and inputs_embeds must be given")
    refused("at least one token is needed", ids[:, :0])
    refused(r"must have shape \[2, 5\], got \[2, 4\]", ids, torch.ones(2, 4))
    refused(r"shape \[2, 5\] or \[2, 10\], got \[2, 6\]", ids, torch.ones(2, 6), cache)
    refused("cache has 2 sequences, the call has 1", ids[:1], None, cache)
    refused("states of 1 blocks, the model has 2", ids, None, TTTCache(cache.blocks[:1], 5))
    refused("logits_to_keep is 1", ids, labels=ids, logits_to_keep=1)
    refused("logits_to_keep must be at least 0, got -2", ids, logits_to_keep=-2)
    refused(r"number or places \[n\], got \[2, 5\]", ids, logits_to_keep=ids)
    refused("to be a number, got a tensor", ids, labels=ids, logits_to_keep=torch.arange(5))
    other = small_model(**(MAMBA if model.config.use_gate is False else {}))
    other = other(ids, use_cache=True).cache
    refused("a block with another backbone: conv must be", ids, None, other)
    tensors = {k: x for k, x in cache.tensors().items() if ".start_" not in k}
    refused("start_w1? is missing", ids, None, TTTCache.from_tensors(tensors, 5))
    refused(r"is on meta, . on cpu", ids, None, cache.to("meta"))
    with pytest.raises(TypeError, match=r"cache must be a TTTCache, .* got tuple"):
        model(ids, cache=cache.blocks)
    with pytest.raises(TypeError, match="a TTTBlockState for each block, got TTTLayerState"):
        TTTCache([block.ttt for block in cache.blocks], 5)
    with pytest.raises(TypeError, match="state must be a TTTBlockState, got TTTLayerState"):
        model.model.layers[0](model.model.embed_tokens(ids), cache.blocks[0].ttt)
    with pytest.raises(ValueError, match="has seen no tokens, got length 7"):
        TTTCache.from_tensors({}, 7)


def test_arguments_that_transformers_hands_to_every_model(model):
    ids = tokens(2, 5)
    wanted = model(ids).logits
    passed = {"output_attentions": None, "return_dict": None, "past_key_values": None}
    passed |= {"token_type_ids": torch.zeros_like(ids), "tokenizer": object(), "is_causal": True}
    assert torch.equal(model(ids, **passed).logits, wanted)
    assert torch.equal(model(ids, output_attentions=False, position_ids=None).logits, wanted)
    body = model.model(ids, **passed).last_hidden_state
    assert torch.equal(body, model.model(ids).last_hidden_state)
    for name, value, told in (
        ("cache_position", ids[0], r"got \[5\]: tokens continue at the end of cache"),
        ("past_key_values", (), r"got \(\): the model keeps states instead of"),
        ("output_attentions", True, "got True: the model has no attention"),
        ("is_causal", False, "got False: the model is always causal"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be None, {told}"):
            model(ids, **{name: value})
    with pytest.raises(TypeError, match=r"cache must be a TTTCache, .* got DynamicCache"):
        model(ids, cache=DynamicCache())
    with pytest.raises(TypeError, match="no argument output_atentions"):
        model(ids, output_atentions=False)


@pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning")
def test_gradient_checkpointing_computes_the_same(model):
    ids = tokens(2, 9)
    model.train()
    wanted = gradients(model, model(ids, labels=ids).loss)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        ours = gradients(model, model(ids, labels=ids).loss)
        for key, x in wanted.items():
            assert_close(ours[key], x, 1e-6, key)
    with pytest.raises(ValueError, match="use_cache must be False"):
        model(ids, use_cache=True)
    with torch.no_grad():
        assert model(ids, use_cache=True).cache is not None
    assert model.eval()(ids, use_cache=True).cache is not None


def test_saved_and_loaded(model, tmp_path):
    ids = tokens(2, 9)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded, report = TTTForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is TTTForCausalLM
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is TTTModel
    assert torch.equal(body(ids).last_hidden_state, model.model(ids).last_hidden_state)
    with pytest.raises(ValueError, match=r"must be 'linear' or .*, got 'x'"):
        TTTForCausalLM.from_pretrained(tmp_path, ttt_layer_type="x")
    with pytest.raises(TypeError, match="use_gate must be True or False, got 'yes'"):
        AutoModelForCausalLM.from_pretrained(tmp_path, use_gate="yes")
    half = TTTForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    exact = model.model.layers[0].ttt
    assert torch.equal(half.model.layers[0].ttt.rotary.table, exact.rotary.table)
    assert torch.equal(half.model.layers[0].ttt.learner.inverse_steps, exact.learner.inverse_steps)


def test_offloaded_to_a_disk(tmp_path):
    pytest.importorskip("accelerate")
    model, ids = small_model(), tokens(2, 9)
    model.save_pretrained(tmp_path)
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "lm_head"), "cpu")
    loaded = TTTForCausalLM.from_pretrained(
        tmp_path,
        device_map={**places, "model.layers.1": "disk"},
        offload_folder=str(tmp_path / "offloaded"),
    )
    assert_close(loaded(ids).logits, model(ids).logits, 1e-6)


def test_an_untied_head_is_its_own(tmp_path):
    model = small_model(tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    loaded = TTTForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)


def test_initial_weights(tmp_path):
    """Also of parts that a file lacks."""
    torch.manual_seed(0)
    config = small_config(hidden_size=128, initializer_range=0.05, **MAMBA)
    body = TTTModel(config)
    body.save_pretrained(tmp_path)
    weights = body.state_dict()
    del weights["layers.1.ttt.learner.w0"], weights["layers.1.ttt.learner.norm_weight"]
    loaded = TTTModel.from_pretrained(None, config=config, state_dict=weights)
    for model in (body, loaded):
        learner = model.layers[1].ttt.learner
        assert abs(learner.w0.std() - 0.02) < 0.001
        assert (learner.norm_weight == 1).all()
        assert abs(model.layers[1].ttt.in_proj.weight.std() - 0.05) < 0.002
        assert abs(model.layers[0].conv.weight).max() > 0.3
        assert (model.layers[0].ttt.merge.weight == 1).all()
    for key, x in weights.items():
        assert torch.equal(loaded.state_dict()[key], x), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(model, dtype):
    ids = tokens(2, 9)
    wanted = model(ids).logits
    model = model.to(dtype).train()
    output = model(ids, labels=ids, use_cache=True)
    assert output.logits.dtype == dtype
    assert output.loss.dtype == torch.float32
    assert_close(output.logits, wanted, 0.1)
    learner = output.cache.blocks[0].ttt.learner
    assert all(
        x.dtype == torch.float32 for key, x in learner.tensors().items() if key != "position"
    )
    assert all(torch.isfinite(x).all() for x in gradients(model, output.loss).values())


def test_autocast(model):
    ids = tokens(2, 9)
    wanted = model(ids, labels=ids)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(ids, labels=ids, use_cache=True)
    assert_close(output.logits, wanted.logits, 0.05)
    assert_close(output.loss, wanted.loss, 5e-3)
    assert output.cache.blocks[0].ttt.learner[0].dtype == torch.float32


def test_one_graph():
    """Of the forward pass, its cache included."""
    model, ids = small_model(num_hidden_layers=1, **MAMBA), tokens(2, 9)
    got, wanted = torch.compile(model, fullgraph=True, backend="eager")(ids), model(ids)
    assert_close(got.logits, wanted.logits, 1e-6)
    assert got.cache.length == 9


def test_one_graph_with_padding():
    """On either side, a graph for both, which returns the cache, too."""
    model, ids = small_model(num_hidden_layers=1, **MAMBA), tokens(6, 11)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for side in ("left", "right"):
            mask = padded(ids, side)
            wanted, got = model(ids, mask), compiled(ids, mask)
            assert_close(got.logits[mask == 1], wanted.logits[mask == 1], 1e-5)
            own, exact = got.cache.tensors(), wanted.cache.tensors()
            for key, x in exact.items():
                assert_close(own[key], x, 1e-5, key)


@pytest.mark.slow
def test_compiled_with_padding():
    """Loss, gradients and the cache."""
    model, ids = small_model(num_hidden_layers=1, **MAMBA), tokens(6, 11)
    mask = padded(ids, "left")
    wanted = model(ids, mask, labels=ids, use_cache=True)
    got = torch.compile(model, fullgraph=True)(ids, mask, labels=ids, use_cache=True)
    assert_close(got.loss, wanted.loss, 1e-5)
    ours, exact = gradients(model, got.loss), gradients(model, wanted.loss)
    for key, x in exact.items():
        assert_close(ours[key], x, 5e-5, key)
    own = got.cache.tensors()
    for key, x in wanted.cache.tensors().items():
        assert_close(own[key], x, 1e-5, key)


@pytest.mark.slow
def test_compiled(model):
    ids = tokens(2, 9)
    wanted = model(ids, labels=ids, use_cache=False)
    got = torch.compile(model, fullgraph=True)(ids, labels=ids, use_cache=False)
    assert_close(got.logits, wanted.logits, 1e-5)
    ours, exact = gradients(model, got.loss), gradients(model, wanted.loss)
    for key, x in exact.items():
        assert_close(ours[key], x, 5e-5, key)
