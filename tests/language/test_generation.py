"""transformers' generate on the models: batches with padding, sampling, beams, streams."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import DynamicCache, PreTrainedTokenizerFast, TextStreamer

from language_models import MAMBA, small_model
from tolerances import assert_close
from vision_ttt import for_inference

KINDS = {
    "linear mamba": MAMBA,
    "mlp": {"ttt_layer_type": "mlp"},
}


@pytest.fixture(params=KINDS)
def model(request):
    return small_model(**KINDS[request.param])


def tokens(*shape):
    return torch.randint(0, 31, shape, generator=torch.Generator().manual_seed(1))


def generate(model, ids, mask=None, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    settings = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(ids, attention_mask=mask, **settings)


def greedy(model, ids, count=7):
    """Every token by a whole forward pass."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids


def test_greedy(model):
    ids = tokens(2, 6)
    wanted, seen = greedy(model, ids), []
    hook = model.model.register_forward_pre_hook(
        lambda _, args, options: seen.append(args[0].shape[1]), with_kwargs=True
    )
    assert torch.equal(generate(model, ids), wanted)
    assert seen == [6, *[1] * 6]
    hook.remove()
    assert torch.equal(generate(model, ids, use_cache=False), wanted)


def test_padding_on_the_left(model):
    ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[0, :4] = mask[2, :8] = 0
    for use_cache in (True, False):
        generated = generate(model, ids, mask, use_cache=use_cache)
        for row in range(3):
            alone = ids[row, mask[row] == 1][None]
            assert torch.equal(generated[row, 9:], greedy(model, alone)[0, alone.shape[1] :])


def test_padding_on_the_right_is_refused(model):
    ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[1, 5:] = 0
    with pytest.raises(ValueError, match=r"padded on the left, .* rows \[1\]"):
        generate(model, ids, mask)


def test_sampling_depends_on_the_seed_alone(model):
    ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[0, :4] = 0

    def sample(seed):
        torch.manual_seed(seed)
        return generate(model, ids, mask, do_sample=True, temperature=1.5, top_k=20)

    assert torch.equal(sample(0), sample(0))
    assert not torch.equal(sample(0), sample(1))


def test_beams_with_a_cache_are_those_without(model):
    ids, mask = tokens(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 0
    options = {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True}
    options["output_scores"] = True
    cached = generate(model, ids, mask, **options)
    whole = generate(model, ids, mask, use_cache=False, **options)
    assert torch.equal(cached.sequences, whole.sequences)
    torch.testing.assert_close(cached.sequences_scores, whole.sequences_scores)


def test_going_on_from_a_cache(model):
    ids = tokens(2, 10)
    cache = model(ids[:, :6], use_cache=True).cache
    assert torch.equal(generate(model, ids, cache=cache), greedy(model, ids))
    assert cache.length == 6
    with pytest.raises(ValueError, match="only with use_cache=True"):
        generate(model, ids, cache=cache, use_cache=False)
    told = (
        "must begin with the 6 tokens that cache has seen and have at least one more, got 6 tokens"
    )
    with pytest.raises(ValueError, match=told):
        generate(model, ids[:, :6], cache=cache)


def test_a_cache_of_another_number_of_sequences(model):
    ids = tokens(2, 10)
    cache = model(ids[:, :6], use_cache=True).cache
    told = "has 2 sequences and generate runs 6.*cache.select"
    with pytest.raises(ValueError, match=told):
        generate(model, ids, cache=cache, num_beams=3)
    repeated = cache.select(torch.tensor([0, 0, 0, 1, 1, 1]))
    wanted = generate(model, ids, num_beams=3)
    assert torch.equal(generate(model, ids, cache=repeated, num_beams=3), wanted)


def test_a_cache_of_keys_and_values_is_refused(model):
    with pytest.raises(TypeError, match=r"cache must be a TTTCache.*got DynamicCache"):
        generate(model, tokens(2, 6), cache=DynamicCache())


@pytest.mark.parametrize("beams", [1, 3])
def test_embeddings_in_place_of_tokens(model, beams):
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    x = model.get_input_embeddings()(ids)
    for padding in (0, 4):
        mask[0, :padding] = 0
        wanted = generate(model, ids, mask, num_beams=beams)[:, 9:]
        got = generate(model, None, mask, inputs_embeds=x, num_beams=beams)
        assert torch.equal(got, wanted)
    cache = model(ids[:, :6], mask[:, :6], use_cache=True).cache
    cache = cache.select(torch.arange(2).repeat_interleave(beams))
    options = {"inputs_embeds": x, "cache": cache, "num_beams": beams}
    assert torch.equal(generate(model, None, mask, **options), wanted)
    with pytest.raises(ValueError, match="inputs_embeds must begin with the 6 tokens"):
        generate(model, None, mask[:, :6], **{**options, "inputs_embeds": x[:, :6]})


def test_in_training_with_gradient_checkpointing(model):
    ids = tokens(2, 6)
    wanted = greedy(model, ids)
    model.train().gradient_checkpointing_enable()
    assert torch.equal(generate(model, ids), wanted)


def test_arguments_of_generate_and_misspelt_ones(model):
    ids = tokens(1, 6)
    wanted = generate(model, ids)
    assert torch.equal(generate(model, ids, token_type_ids=torch.zeros_like(ids)), wanted)
    assert torch.equal(generate(model, ids, tokenizer=Letters()), wanted)
    assert torch.equal(generate(model, ids, position_ids=torch.arange(6)[None]), wanted)
    with pytest.raises(ValueError, match="is_causal must be None"):
        generate(model, ids, is_causal=False)
    with pytest.raises(ValueError, match="cache_parms"):
        generate(model, ids, cache_parms=1)


class Letters:
    """A tokenizer of one letter per number."""

    def decode(self, ids, **options):
        return "".join(chr(ord("a") + int(i)) for i in ids)


def test_streaming(model, capsys):
    ids = tokens(1, 6)
    generated = generate(model, ids, streamer=TextStreamer(Letters()))
    assert capsys.readouterr().out == Letters().decode(generated[0]) + "\n"


def test_stop_strings(model):
    """Generation ends with the token that completes one: here the first."""
    letters = Tokenizer(BPE({chr(ord("a") + number): number for number in range(31)}, []))
    letters.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    ids = tokens(1, 6)
    first = greedy(model, ids, 1)
    strings = [tokenizer.decode(first[0, -1:])]
    assert torch.equal(generate(model, ids, tokenizer=tokenizer, stop_strings=strings), first)


def test_packed_for_inference(model):
    """Its linear layers; the rest stays as it is."""
    ids = tokens(2, 6)
    fast = for_inference(model)
    with torch.no_grad():
        assert_close(fast(ids).logits, model(ids).logits, 1e-5)
    assert torch.equal(generate(fast, ids), greedy(model, ids))


@pytest.mark.parametrize("size", [1, 4, 20])
def test_a_prompt_that_is_read_in_parts(model, size):
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :5] = 0
    wanted, seen = generate(model, ids, mask), []
    hook = model.model.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    got = generate(model, ids, mask, prefill_chunk_size=size)
    assert torch.equal(got, wanted)
    assert max(seen) == min(size, 9)
    hook.remove()
    embedded = {"inputs_embeds": model.get_input_embeddings()(ids), "prefill_chunk_size": size}
    assert torch.equal(generate(model, None, mask, **embedded), wanted[:, 9:])
    cache = model(ids[:, :3], mask[:, :3], use_cache=True).cache
    got = generate(model, ids, mask, cache=cache, prefill_chunk_size=size)
    assert torch.equal(got, wanted)
    beams = generate(model, ids, mask, num_beams=3, prefill_chunk_size=size)
    assert torch.equal(beams, generate(model, ids, mask, num_beams=3))


def test_parts_need_a_size_and_a_cache(model):
    ids = tokens(1, 6)
    with pytest.raises(ValueError, match="prefill_chunk_size must be at least 1, got 0"):
        generate(model, ids, prefill_chunk_size=0)
    with pytest.raises(ValueError, match="prefill_chunk_size needs use_cache=True, got False"):
        generate(model, ids, prefill_chunk_size=2, use_cache=False)


def test_no_continuous_batching(model):
    told = "continuous batching pages keys and values, a TTT language model has states"
    with pytest.raises(ValueError, match=told):
        model.generate_batch([[1, 2, 3], [4, 5]])
    with pytest.raises(ValueError, match=told):
        generate(model, tokens(1, 6), cache_implementation="paged")
