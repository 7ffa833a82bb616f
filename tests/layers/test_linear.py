"""nn.Linear by our products: the same numbers, hooks, and what it is made of."""

import copy

import pytest
import torch
from torch import nn

from kernel_calls import record_kernel_calls
from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt import for_inference
from vision_ttt.inference.linear import PackedLinear
from vision_ttt.layers import Linear, unfuse
from vision_ttt.layers.linear import FEWEST_ROWS, fuse_linear
from vision_ttt.ops._table import TABLE


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of the kernel."""
    return record_kernel_calls(monkeypatch, TABLE["linear"])


def make_layers(bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    plain = nn.Linear(32, 48, bias=bias, dtype=dtype)
    return plain, Linear.of(copy.deepcopy(plain))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients(bias, dtype, calls):
    plain, fused = make_layers(bias, dtype)
    x = torch.randn(2, FEWEST_ROWS, 32, dtype=dtype)
    weights = torch.randn(2, FEWEST_ROWS, 48, dtype=dtype)
    found = []
    for layer in (plain, fused):
        own = x.clone().requires_grad_()
        out = layer(own)
        out.backward(weights)
        found.append([out, own.grad, *(p.grad for p in layer.parameters())])
    assert len(calls) == (1 if dtype == torch.float32 else 0)  # float64 is PyTorch's
    for i, (wanted, got) in enumerate(zip(*found, strict=True)):
        assert_close(got, wanted, (GRADIENT if i else FORWARD)[dtype])


def test_few_rows_and_a_layer_that_is_switched_off_are_pytorchs(calls):
    plain, fused = make_layers()
    x = torch.randn(FEWEST_ROWS, 32, requires_grad=True)
    assert torch.equal(fused(x[1:]), plain(x[1:]))
    assert not calls
    fused(x)
    assert len(calls) == 1
    unfuse(fused)
    assert torch.equal(fused(x), plain(x))
    assert len(calls) == 1
    with pytest.raises(ValueError, match="Linear: fused can be switched off later, not on"):
        fused.fused = True


def test_it_shares_the_parameters_and_is_named_as_before():
    plain, _ = make_layers()
    fused = Linear.of(plain)
    assert fused.weight is plain.weight
    assert fused.bias is plain.bias
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert repr(fused) == "Linear(in_features=32, out_features=48, bias=True, fused=True)"


def test_every_plain_layer_of_a_model_is_replaced_and_no_subclass():
    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4, bias=False)), Other(4, 5))
    names = list(model.state_dict())
    fuse_linear(model)
    assert [type(model[0]), type(model[1][0]), type(model[2])] == [Linear, Linear, Other]
    assert list(model.state_dict()) == names


def test_for_inference_packs_it():
    plain, fused = make_layers()
    packed = for_inference(nn.Sequential(fused))
    assert any(isinstance(module, PackedLinear) for module in packed.modules())
    x = torch.randn(2, 9, 32)
    assert_close(packed(x), plain(x), FORWARD[torch.float32])
