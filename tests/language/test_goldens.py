"""Tensors computed by the authors' released code, TTT-LM, under our names."""

import pytest
import torch

from language_models import GOLDENS, released_model, weights
from tolerances import assert_close
from vision_ttt import convert, for_training
from vision_ttt.acceleration import composite_linear


@pytest.mark.parametrize("composite", [False, True])
@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.filterwarnings("ignore:for_training leaves:RuntimeWarning")  # the TTT layers
def test_outputs_and_gradients(name, composite, monkeypatch):
    """Logits, loss, every hidden state and every gradient that is stored."""
    monkeypatch.setattr(composite_linear, "FEWEST_ROWS", 1)  # a golden's tokens are few
    model, tensors, tolerance = released_model(name)
    if composite:
        for_training(model)
    ids = tensors["input.input_ids"]
    last = []
    model.model.norm.register_forward_pre_hook(lambda norm, x: last.append(x[0]))
    output = model(ids, labels=ids, output_hidden_states=True)
    results = {
        "logits": output.logits,
        "loss": output.loss.unsqueeze(0),
        "hidden_states": torch.stack(output.hidden_states),
    }
    for key, got in results.items():
        assert_close(got, tensors[f"output.{key}"], tolerance["forward"], key)
    assert_close(last[0], tensors["output.hidden_states"][-2], tolerance["forward"], "last block")

    output.loss.backward()
    # A released gradient may be of a part of one of ours. It is converted as the weights are,
    # beside NaN for those that the golden leaves out.
    given = weights(tensors, "output.grad.")
    released = {
        key: given.get(key, torch.full_like(x, torch.nan))
        for key, x in weights(tensors).items()
        if key != "lm_head.weight"  # tied
    }
    wanted, compared = convert.remap(released, model), 0
    for key, parameter in model.named_parameters():
        known = ~wanted[key].isnan()
        if known.any():
            gradient, own = (x.where(known, 0) for x in (wanted[key], parameter.grad))
            assert_close(own, gradient, tolerance["gradients"], key)
            compared += known.sum().item()
    assert compared == sum(x.numel() for x in given.values())


@pytest.mark.parametrize("name", GOLDENS)
def test_prefill_state_and_greedy_tokens(name):
    model, tensors, tolerance = released_model(name)
    ids = tensors["input.input_ids"]
    with torch.no_grad():
        output = model(ids, use_cache=True)
    forward = tolerance["forward"]
    assert_close(output.logits, tensors["output.logits_cached_prefill"], forward)
    state = output.cache.blocks[0]
    assert state.ttt.learner.position == ids.shape[1] % 16
    cached = weights(tensors, "output.cache.layer0.")
    assert cached
    for key, wanted in cached.items():
        got = of_state(state, key)
        if key.startswith("conv."):
            wanted = wanted[..., 1:].transpose(1, 2)  # the release keeps one token more
        got = got[tuple(slice(n) for n in wanted.shape)]  # of the MLP's, the first row and head
        assert_close(got, wanted, forward, key)

    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        use_cache=True,
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = generated.sequences[:, ids.shape[1] :]
    assert torch.equal(new, tensors["output.generated_ids"])
    assert_close(torch.stack(generated.logits, 1), tensors["output.decode_logits"], forward)


def of_state(state, key):
    """A block's tensor by its name in the released cache."""
    convolutions = {
        "conv.pre_conv": state.conv,
        "conv.ttt_conv_q": state.ttt.conv_q,
        "conv.ttt_conv_k": state.ttt.conv_k,
    }
    if key in convolutions:
        return convolutions[key]
    name, kind = key.split("_")
    prefix = {"states": "start", "grad": "sum"}[kind]
    own = name.lower() if hasattr(state.ttt.learner, "w1") else name[0].lower()
    x = getattr(state.ttt.learner, f"{prefix}_{own}")
    return x.unsqueeze(2) if name.startswith("b") else x
