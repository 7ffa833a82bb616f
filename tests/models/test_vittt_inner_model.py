"""Vittt with MLP inner models."""

import pytest
import timm
import torch

from tolerances import assert_close
from vision_ttt.layers import TTTMLP, MLPLearner, TTTLinear
from vision_ttt.ops import _native, use_backend


def test_vittt_with_mlp_inner_models_runs_and_learns():
    torch.manual_seed(0)
    model = timm.create_model("vittt_nano_patch4_32", num_classes=10, inner_model="mlp", depth=2)
    mixers = [block.mixer.ttt for block in model.blocks]
    assert all(isinstance(ttt, TTTMLP) and ttt.base_learning_rate == 0.1 for ttt in mixers)
    logits = model(torch.randn(2, 3, 32, 32))
    torch.nn.functional.cross_entropy(logits, torch.tensor([1, 2])).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.skipif(_native.LIBRARY is None, reason="not compiled")
def test_the_compiled_kernels_serve_the_model():
    torch.manual_seed(0)
    model = timm.create_model(
        "vittt_nano_patch4_32", num_classes=10, inner_model="mlp", depth=2, num_heads=3
    )
    images = torch.randn(2, 3, 32, 32)

    def solve(backend: str) -> list[torch.Tensor]:
        with use_backend(backend):
            logits = model(images)
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor([1, 2]))
            return [logits, *torch.autograd.grad(loss, list(model.parameters()))]

    for got, wanted in zip(solve("cpu"), solve("dual"), strict=True):
        assert_close(got, wanted, 1e-4)


def test_only_the_initial_states_make_the_parameters_differ():
    """Per block, direction and head: 8 d² + 5 d numbers instead of d² + d."""
    linear, mlp = (
        timm.create_model("vittt_tiny_patch16_224", inner_model=name) for name in ("linear", "mlp")
    )
    assert isinstance(linear.blocks[0].mixer.ttt, TTTLinear)
    dim, heads = 64, 12 * 2 * 3
    numbers = [sum(p.numel() for p in model.parameters()) for model in (linear, mlp)]
    assert numbers[1] - numbers[0] == heads * (7 * dim**2 + 4 * dim)


def test_inner_parameters_do_not_decay():
    model = timm.create_model("vittt_nano_patch4_32", inner_model="mlp", depth=1)
    names = {
        f"{owner}.{name}"
        for owner, module in model.named_modules()
        if isinstance(module, MLPLearner)
        for name, _ in module.named_parameters()
    }
    assert names
    assert names <= model.no_weight_decay()


def test_an_unknown_inner_model():
    with pytest.raises(ValueError, match=r"inner_model must be one of \['linear', 'mlp'\], got"):
        timm.create_model("vittt_nano_patch4_32", inner_model="tree")
