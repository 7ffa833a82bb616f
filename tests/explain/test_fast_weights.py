"""Fast weights: drift, rank and rates along the scan against the states of the op's definition."""

import pytest
import timm
import torch

from tolerances import assert_close
from vision_ttt.explain import effective_rank, fast_weights
from vision_ttt.ops import ttt_linear, ttt_mlp

OPS = {"linear": (ttt_linear, ("w0",), (0,)), "mlp": (ttt_mlp, ("w1", "w2"), (0, 2))}


def nano(**options):
    torch.manual_seed(0)
    options = {"num_classes": 10, "embed_dim": 32, "num_heads": 2, "depth": 1, **options}
    return timm.create_model("vittt_nano_patch4_32", **options)


@pytest.mark.parametrize("kind", OPS)
def test_drift_and_rank_are_those_of_the_states(kind):
    """With mini-batches of 24 tokens, of which the last has 16, both directions."""
    model, images = nano(inner_model=kind, mini_batch_size=24), torch.randn(2, 3, 32, 32)
    ((name, found),) = fast_weights(model, images).items()
    assert name == "blocks.0.mixer.ttt"
    assert found.drift.shape == found.effective_rank.shape == (4, 4)
    problems = []
    layer = model.blocks[0].mixer.ttt
    handle = layer.register_forward_pre_hook(
        lambda layer, inputs: problems.append(layer.inner_problem(*inputs))
    )
    with torch.no_grad():
        model.eval()(images)
    handle.remove()
    (problem,) = problems
    run, names, places = OPS[kind]
    tokens = {name: problem.pop(name) for name in ("q", "k", "v", "eta")}
    for m, end in enumerate((24, 48, 64), 1):
        for direction, seen in enumerate((slice(end), slice(64 - end, 64))):
            heads = slice(2 * direction, 2 * direction + 2)
            part = {name: x[:, seen] for name, x in tokens.items()}
            _, state = run(**part, **problem, return_state=True, backend="reference")
            change = [state[i] - problem[name] for i, name in zip(places, names, strict=True)]
            blocks = [  # one matrix of all weights
                torch.stack([torch.block_diag(*w) for w in zip(*each, strict=True)])
                for each in zip(*(w[:, heads] for w in change), strict=True)
            ]
            whole = torch.stack(blocks)  # [B, H, …]
            first = sum(problem[name][heads].square().sum((1, 2)) for name in names).sqrt()
            drift = (whole.flatten(2).norm(dim=-1) / first).mean(0)
            assert_close(found.drift[heads, m], drift, 1e-4)
            assert_close(found.effective_rank[heads, m], effective_rank(whole).mean(0), 1e-3)
    assert not found.drift[:, 0].any()
    assert not found.effective_rank[:, 0].any()
    rates = tokens["eta"].mean(0).T
    assert_close(found.rates[:2], rates[:2], 1e-6)
    assert_close(found.rates[2:], rates[2:].flip(1), 1e-6)


def test_the_model_is_left_alone():
    model, images = nano().train(), torch.randn(1, 3, 32, 32)
    fast_weights(model, images)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    found = fast_weights(model.bfloat16(), images.bfloat16())["blocks.0.mixer.ttt"]
    assert {x.dtype for x in found} == {torch.float32}


def test_models_without_ttt_layers_have_no_fast_weights():
    assert fast_weights(torch.nn.Linear(2, 2), torch.zeros(1, 2)) == {}


def test_effective_rank_counts_equal_directions():
    assert effective_rank(torch.diag(torch.tensor([2.0, 2, 2, 0]))).item() == pytest.approx(3)
    outer = torch.outer(torch.arange(1.0, 4), torch.arange(1.0, 6))
    assert effective_rank(outer).item() == pytest.approx(1, abs=1e-4)
    assert effective_rank(torch.zeros(2, 3, 3)).tolist() == [0, 0]
