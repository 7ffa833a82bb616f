"""Padding of the models, on either side: whatever its embeddings are changes nothing."""

import pytest
import torch
from torch import Tensor

from language_models import MAMBA, small_model
from padded_calls import ANY, absent, check_padding
from vision_ttt import for_training

KINDS = {
    "linear": {},
    "mlp mamba": {"ttt_layer_type": "mlp", **MAMBA},
}
LENGTH = 7
LENGTHS = [0, 3, 7, 5]


@pytest.fixture(params=KINDS)
def model(request):
    return small_model(**KINDS[request.param])


def padding(side: str) -> Tensor:
    behind = absent(LENGTHS, LENGTH)
    return {"right": behind, "left": behind.flip(1), "between": behind.roll(-2, 1)}[side]


def leaves(state) -> list[Tensor]:
    if torch.is_tensor(state):
        return [state]
    return [x for part in state if isinstance(part, (tuple, Tensor)) for x in leaves(part)]


def check(model, side, value, cache=None, **options):
    mask = (~padding(side)).long()
    generator = torch.Generator().manual_seed(1)
    embedded = torch.randn(4, LENGTH, 32, generator=generator).to(model.dtype)

    def call(inputs_embeds):
        given = {"inputs_embeds": inputs_embeds, "attention_mask": mask, "cache": cache}
        output = model(**given, **options, use_cache=True, output_hidden_states=True)
        loss = [] if output.loss is None else [output.loss]
        return [output.logits, *output.hidden_states, *loss, *leaves(output.cache.blocks)]

    others = [*model.parameters(), *(() if cache is None else leaves(cache.blocks))]
    others = [x for x in others if x.is_floating_point()]
    check_padding(call, {"inputs_embeds": embedded}, others, padding(side), value)


@ANY
@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_padding_changes_nothing(model, side, value):
    labels = torch.randint(0, 31, (4, LENGTH), generator=torch.Generator().manual_seed(2))
    check(model, side, value, labels=labels)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_behind_a_cache(model, side):
    """Of rows that are at several places."""
    ids = torch.randint(0, 31, (4, LENGTH), generator=torch.Generator().manual_seed(2))
    cache = model(ids, (~padding("left")).flip(0), use_cache=True).cache.detach()
    for x in leaves(cache.blocks):
        x.requires_grad_(x.is_floating_point())
    check(model, side, float("nan"), cache)


@pytest.mark.filterwarnings("ignore:for_training leaves:RuntimeWarning")  # the TTT layers
def test_padding_in_half_precision_and_for_training():
    for convert in (for_training, torch.nn.Module.bfloat16):
        check(convert(small_model(**MAMBA)), "left", float("nan"))


@pytest.mark.parametrize("keep", [3, torch.tensor([6, 0])], ids=["last", "places"])
def test_logits_that_are_kept_are_zero_at_padding(keep):
    model, mask = small_model(), ~padding("right")
    places = torch.arange(LENGTH)[-keep:] if isinstance(keep, int) else keep
    logits = model(torch.ones(4, LENGTH, dtype=torch.long), mask, logits_to_keep=keep).logits
    assert ((logits != 0).any(-1) == mask[:, places]).all()


@ANY
@pytest.mark.parametrize("kind", KINDS)
def test_padding_of_a_block(kind, value):
    block = small_model(**KINDS[kind]).model.layers[0]
    x = torch.randn(4, LENGTH, 32, generator=torch.Generator().manual_seed(1))

    def call(x):
        o, state = block(x, None, True, torch.tensor(LENGTHS))
        return [o, *leaves(state)]

    check_padding(call, {"x": x}, list(block.parameters()), padding("right"), value)


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_padding_token_is_not_read_in_generation(use_cache):
    model = small_model(tie_word_embeddings=False)
    ids = torch.randint(1, 31, (3, 6), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :2] = 0
    ids[mask == 0] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "use_cache": use_cache}
    model.lm_head.weight.data[0] = 0  # so that no new token is the padding's
    wanted = model.generate(ids, attention_mask=mask, **options)
    assert (wanted[:, 6:] != 0).all()
    model.get_input_embeddings().weight.data[0] = float("nan")
    assert torch.equal(model.generate(ids, attention_mask=mask, **options), wanted)


def test_the_head_may_have_hooks_of_its_backward_pass(model):
    seen = []
    model.lm_head.register_full_backward_hook(lambda _m, _i, grads: seen.append(grads[0]))
    ids = torch.randint(0, 31, (4, LENGTH), generator=torch.Generator().manual_seed(2))
    absent = padding("right")
    output = model(input_ids=ids, attention_mask=(~absent).long(), labels=ids)
    output.loss.backward()
    assert not output.logits[absent].any()
    assert seen[0].any()
    assert not seen[0][absent].any()
