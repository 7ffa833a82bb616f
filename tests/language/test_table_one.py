"""The rows of TTT's Table 1, from linear attention to TTT-Linear in the Mamba backbone."""

import pytest
import torch
import torch.nn.functional as F

from language_models import MAMBA, small_model
from tolerances import assert_close
from vision_ttt.language import TTTCache, TTTForCausalLM
from vision_ttt.layers import LinearAttention, LinearLearner, TTTLinear

LENGTH = 23
OFF = {"learnable_w0": False, "inner_norm": False, "learnable_eta": False}
ROWS = {
    "linear attention": {"ttt_layer_type": "normalised_linear_attention", **OFF},
    "linear attention improved": {"ttt_layer_type": "linear_attention", **OFF},
    "equivalence": OFF,
    "w0": {"inner_norm": False, "learnable_eta": False},
    "norm": {"learnable_eta": False},
}


def test_batch_gradient_descent_from_zero_is_linear_attention():
    """TTT, Theorem 1, in float64: in whole models, and as a sum over all earlier tokens."""
    attention, descent = (
        small_model(**OFF, ttt_layer_type=kind, mini_batch_size=64).double()
        for kind in ("linear_attention", "linear")
    )
    for (name, one), (other, two) in zip(
        attention.named_parameters(), descent.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(one, two)  # the same seed gives both the same weights
    tokens = torch.randint(0, 31, (2, LENGTH))
    assert_close(descent(tokens).logits, attention(tokens).logits, 1e-10)
    found = [
        torch.autograd.grad(m(tokens).logits.sum(), m.lm_head.weight)[0]
        for m in (attention, descent)
    ]
    assert_close(*found, 1e-10)


@pytest.mark.parametrize("normalised", [False, True])
def test_linear_attention_is_a_sum_over_earlier_tokens(normalised):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 150, 2, 8, dtype=torch.float64)  # more than two chunks
    eta = torch.rand(2, 150, 2, dtype=torch.float64)
    o = LinearAttention(2, 8, normalised=normalised)(q, k, v, eta)
    if normalised:
        weights = torch.einsum("bthd,bshd->bhts", F.elu(q) + 1, F.elu(k) + 1).tril()
    else:
        weights = (torch.einsum("bthd,bshd->bhts", q, k) + 1).tril()
    wanted = torch.einsum("bhts,bsh,bshd->bthd", weights, eta, v)
    if normalised:
        wanted = wanted / weights.sum(-1).transpose(1, 2).unsqueeze(-1)
    assert_close(o, wanted, 1e-10)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_linear_attention_sums_in_float32(normalised, autocast):
    q, k, v = torch.randn(3, 1, 300, 2, 8, dtype=torch.bfloat16)
    eta = torch.rand(1, 300, 2, dtype=torch.bfloat16)
    attention = LinearAttention(2, 8, normalised=normalised)
    wanted, state = attention(q, k, v, eta.float(), return_state=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for rates in (eta, eta.float()):
            o, found = attention(q, k, v, rates, return_state=True)
            assert torch.equal(o, wanted)
            assert found.w.dtype == torch.float32
            assert torch.equal(found.w, state.w)
            assert torch.equal(found.b, state.b)
    rounded = found._replace(w=found.w.bfloat16(), b=found.b.bfloat16())
    assert attention(q, k, v, eta, rounded).dtype == torch.bfloat16


def test_linear_attention_refuses_what_does_not_fit():
    attention, (q, k, v) = LinearAttention(2, 8), torch.randn(3, 3, 5, 2, 8)
    eta = torch.rand(3, 5, 2)
    _, state = attention(q, k, v, eta, return_state=True)
    told = r"LinearAttention: state\.w must have shape \[3, 2, 8, 8\], got \[1, 2, 8, 8\]"
    with pytest.raises(ValueError, match=told):
        attention(q, k, v, eta, state._replace(w=state.w[:1]))
    with pytest.raises(TypeError, match="state must be a LinearState, got Tensor"):
        attention(q, k, v, eta, state.w)
    for name in ("w", "b", "position"):
        with pytest.raises(ValueError, match=rf"state\.{name} is missing: the state cannot go on"):
            attention(q, k, v, eta, state._replace(**{name: None}), return_state=True)
    _, other = LinearLearner(2, 8)(q, k, v, eta, return_state=True)
    with pytest.raises(ValueError, match="state has start_w: it is a state of ttt_linear"):
        attention(q, k, v, eta, other)
    with pytest.raises(ValueError, match="T must be at least 1"):
        attention(q[:, :0], k[:, :0], v[:, :0], eta[:, :0])


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("backbone", [{}, MAMBA], ids=["transformer", "mamba"])
def test_every_row_goes_on_and_reads_no_padding(name, backbone):
    model = small_model(**ROWS[name], **backbone)
    tokens = torch.randint(0, 31, (2, LENGTH))
    with torch.no_grad():
        whole = model(tokens, use_cache=True)
        first = model(tokens[:, :9], use_cache=True)
        cache = TTTCache.from_tensors(first.cache.tensors(), first.cache.length)
        rest = model(tokens[:, 9:], cache=cache, use_cache=True)
        assert_close(torch.cat([first.logits, rest.logits], 1), whole.logits, 1e-4)
        mask = torch.ones_like(tokens)
        mask[1, :5] = 0
        padded = model(tokens, attention_mask=mask).logits
        assert_close(padded[1, 5:], model(tokens[1:, 5:]).logits[0], 1e-4)


@pytest.mark.parametrize("name", ROWS)
def test_a_model_made_on_meta_takes_the_tensors_of_another(name):
    model = small_model(**ROWS[name])
    with torch.device("meta"):
        loaded = TTTForCausalLM(model.config).eval()
    loaded.load_state_dict(model.state_dict(), assign=True)
    tokens = torch.randint(0, 31, (2, LENGTH))
    with torch.inference_mode():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_rates_that_are_not_learned_are_constant():
    layer = TTTLinear(32, 2, learned_rates=False, base_learning_rate=0.5)
    q, _, _, eta, _ = layer.views(torch.randn(2, 5, 32, dtype=torch.float32))
    assert eta.shape == q.shape[:3]
    assert (eta == 0.5 / 16).all()
    assert layer.learner.position_scale() is None
    assert {
        name for name, _ in layer.named_parameters() if "rate" in name or "offset" in name
    } == set()
