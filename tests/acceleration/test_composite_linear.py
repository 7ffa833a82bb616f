"""nn.Linear by our products: the same numbers, and which layers become so."""

import copy

import pytest
import torch
from torch import nn

from kernel_calls import record_kernel_calls
from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt import for_inference, for_training, to_plain
from vision_ttt.acceleration.composite_linear import FEWEST_ROWS, CompositeLinear
from vision_ttt.acceleration.packed_linear import PackedLinear
from vision_ttt.ops._table import TABLE


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of the kernel."""
    return record_kernel_calls(monkeypatch, TABLE["linear"])


def make_layers(bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    plain = nn.Linear(32, 48, bias=bias, dtype=dtype)
    return plain, for_training(copy.deepcopy(plain))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients(bias, dtype, calls):
    plain, composite = make_layers(bias, dtype)
    x = torch.randn(2, FEWEST_ROWS, 32, dtype=dtype)
    weights = torch.randn(2, FEWEST_ROWS, 48, dtype=dtype)
    found = []
    for layer in (plain, composite):
        own = x.clone().requires_grad_()
        out = layer(own)
        out.backward(weights)
        found.append([out, own.grad, *(p.grad for p in layer.parameters())])
    assert len(calls) == (1 if dtype == torch.float32 else 0)  # float64 is PyTorch's
    for i, (wanted, got) in enumerate(zip(*found, strict=True)):
        assert_close(got, wanted, (GRADIENT if i else FORWARD)[dtype])


def test_few_rows_and_a_layer_that_went_back_are_pytorchs(calls):
    plain, composite = make_layers()
    x = torch.randn(FEWEST_ROWS, 32, requires_grad=True)
    assert torch.equal(composite(x[1:]), plain(x[1:]))
    assert not calls
    composite(x)
    assert len(calls) == 1
    to_plain(composite)
    assert torch.equal(composite(x), plain(x))
    assert len(calls) == 1


def test_a_frozen_layer_is_pytorchs_where_its_input_has_a_gradient(calls):
    plain, composite = (layer.requires_grad_(False) for layer in make_layers())
    x = torch.randn(FEWEST_ROWS, 32, requires_grad=True)
    assert torch.equal(composite(x), plain(x))
    assert not calls
    composite(x.detach())
    assert len(calls) == 1


def test_every_plain_layer_of_a_model_is_replaced_and_no_subclass():
    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4, bias=False)), Other(4, 5))
    names = list(model.state_dict())
    for_training(model, strict=True)
    kinds = [type(model[0]), type(model[1][0]), type(model[2])]
    assert kinds == [CompositeLinear, CompositeLinear, Other]
    assert list(model.state_dict()) == names


def test_for_inference_packs_it():
    plain, composite = make_layers()
    packed = for_inference(nn.Sequential(composite))
    assert any(isinstance(module, PackedLinear) for module in packed.modules())
    x = torch.randn(2, 9, 32)
    assert_close(packed(x), plain(x), FORWARD[torch.float32])


def test_a_layer_of_no_inputs_is_its_bias():
    layer = for_training(nn.Linear(0, 5)).train()
    assert torch.equal(layer(torch.zeros(3, 0)), layer.bias.expand(3, 5))
